//! Hexadecimal digits, and the digests that are shown in them.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// Two lower-case digits for each byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// First 16 hexadecimal digits of the SHA-256.
pub fn short_digest(bytes: impl AsRef<[u8]>) -> String {
    hex(&Sha256::digest(bytes)[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_the_bytes_in_their_order() {
        assert_eq!(hex(&[0, 1, 0xab, 0xff]), "0001abff");
        // Of FIPS 180-2.
        assert_eq!(short_digest("abc"), "ba7816bf8f01cfea");
    }
}
