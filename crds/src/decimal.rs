//! Decimals with a few places, kept as whole numbers of the last one.

/// Reads digits, and perhaps a point with digits after it, as units of the last of `places`. `None` for anything else:
/// a sign, an exponent, more digits than these.
pub fn read(text: &str, whole_digits: usize, places: usize) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |s: &str, max: usize| (1..=max).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole, whole_digits) || !is_number(fraction, places) {
        return None;
    }
    format!("{whole}{fraction:0<places$}").parse().ok()
}

/// Without zeros at the end, and without the point where nothing follows it.
pub fn show(units: u16, places: u32) -> String {
    let scale = 10_u16.pow(places);
    let text = format!("{}.{:0width$}", units / scale, units % scale, width = places as usize);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
