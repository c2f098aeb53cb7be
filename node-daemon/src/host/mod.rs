//! The host itself, as its kernel shows it.

pub mod clock;
