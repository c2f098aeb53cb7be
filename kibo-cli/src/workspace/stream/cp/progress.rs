//! How far a copy is, on a terminal: bytes and rate, and what part of it when the whole is known.

use std::{
    io::{self, IsTerminal as _, Read, Write},
    time::Duration,
};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::remark;

/// Shared between what counts and what shows; nothing is shown without a terminal.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
    is_shown: bool,
}

impl Progress {
    pub fn begin(name: &str, quiet: bool) -> Self {
        let is_shown = !quiet && io::stderr().is_terminal();
        if !is_shown {
            return Self { bar: ProgressBar::hidden(), is_shown };
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        style(&bar, "{spinner} {prefix}  {bytes}  {bytes_per_sec}  {elapsed}");
        bar.set_prefix(name.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, is_shown }
    }

    /// Whether it is worth finding out how much there is.
    pub fn is_shown(&self) -> bool {
        self.is_shown
    }

    pub fn total(&self, bytes: u64) {
        self.bar.set_length(bytes);
        style(&self.bar, "{spinner} {prefix}  {wide_bar}  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}");
    }

    pub fn add(&self, bytes: usize) {
        self.bar.inc(bytes as u64);
    }

    /// Leaves one line behind.
    pub fn end(&self, what: &str) {
        self.bar.finish_and_clear();
        if self.is_shown {
            let (bytes, took) = (self.bar.position(), self.bar.elapsed());
            let milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX).max(1);
            let rate = HumanBytes(bytes.saturating_mul(1000) / milliseconds);
            remark(&format!("copied {what}: {} in {:.1} s ({rate}/s)", HumanBytes(bytes), took.as_secs_f64()));
        }
    }

    /// Nothing is left behind.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }

    /// Something beside the bar.
    pub fn remark(&self, text: &str) {
        self.bar.suspend(|| remark(text));
    }
}

fn style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
}

/// Counts what passes.
pub struct Counted<T> {
    pub inner: T,
    pub progress: Progress,
}

impl<T: Read> Read for Counted<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.progress.add(length);
        Ok(length)
    }
}

impl<T: Write> Write for Counted<T> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let length = self.inner.write(data)?;
        self.progress.add(length);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
