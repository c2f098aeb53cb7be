//! Consistent overhead byte stuffing (Cheshire and Baker, 1999): encoded bytes are never 0, so a 0 on the wire is always
//! the end of a frame, whatever came before it.
//!
//! By hand because the crates for it go byte by byte, and vector instructions are what an emulated guest does slowest:
//! this looks at a word at a time.

/// The longest run between two code bytes.
const MAX_RUN: usize = 254;

const WORD: usize = size_of::<u64>();
/// The codes of runs without anything in them: what zeros become.
const EMPTY_RUNS: [u8; WORD] = [1; WORD];

/// The most bytes that `len` plain bytes become.
pub const fn max_encoded_len(len: usize) -> usize {
    len + len / MAX_RUN + 1
}

/// What [`encode_into`] needs beyond [`max_encoded_len`], since words are written as a whole.
pub const SPARE: usize = WORD;

/// Writes the encoded form of `plain`, without the ending 0, and says how long it is.
///
/// # Panics
///
/// Where `out` is shorter than [`max_encoded_len`] and [`SPARE`].
pub fn encode_into(plain: &[u8], out: &mut [u8]) -> usize {
    let (mut read, mut write) = (0, 0);
    loop {
        let rest = &plain[read..];
        if let Some([0, 0, 0, 0, 0, 0, 0, 0]) = rest.first_chunk::<WORD>() {
            out[write..write + WORD].copy_from_slice(&EMPTY_RUNS);
            (read, write) = (read + WORD, write + WORD);
            continue;
        }
        let window = &rest[..rest.len().min(MAX_RUN)];
        let zero = find_zero(window);
        let run = zero.unwrap_or(window.len());
        out[write] = code_of(run);
        let begin = write + 1;
        match rest.first_chunk::<WORD>() {
            Some(word) if run <= WORD => out[begin..begin + WORD].copy_from_slice(word),
            _ => out[begin..begin + run].copy_from_slice(&window[..run]),
        }
        (read, write) = (read + run + usize::from(zero.is_some()), begin + run);
        // A full run stands for itself, without a zero at its end; behind a zero there is always one more.
        if zero.is_none() && read == plain.len() {
            return write;
        }
    }
}

/// Decodes `encoded` (without the ending 0) into `buffer`; `None` when it is no encoding of anything. The buffer keeps
/// what room it has got.
pub fn decode<'a>(encoded: &[u8], buffer: &'a mut Vec<u8>) -> Option<&'a [u8]> {
    // Words are written as a whole.
    if buffer.len() < encoded.len() + WORD {
        buffer.resize(encoded.len() + WORD, 0);
    }
    let (mut read, mut write) = (0, 0);
    while let Some(code) = encoded.get(read) {
        // The last code of all stands for no zero.
        if *code == 1 && read + WORD < encoded.len() && encoded[read..read + WORD] == EMPTY_RUNS {
            buffer[write..write + WORD].fill(0);
            (read, write) = (read + WORD, write + WORD);
            continue;
        }
        let run = usize::from(*code).checked_sub(1)?;
        let (begin, end) = (read + 1, read + 1 + run);
        let bytes = encoded.get(begin..end)?;
        match encoded.get(begin..begin + WORD) {
            Some(word) if run <= WORD => buffer[write..write + WORD].copy_from_slice(word),
            _ => buffer[write..write + run].copy_from_slice(bytes),
        }
        (read, write) = (end, write + run);
        if run < MAX_RUN && read < encoded.len() {
            buffer[write] = 0;
            write += 1;
        }
    }
    Some(&buffer[..write])
}

/// What comes after the zeros at the beginning.
pub(crate) fn after_zeros(bytes: &[u8]) -> &[u8] {
    let (words, _) = bytes.as_chunks::<WORD>();
    let zeros = words.iter().take_while(|word| u64::from_ne_bytes(**word) == 0).count() * WORD;
    let rest = &bytes[zeros..];
    let more = rest.iter().take_while(|byte| **byte == 0).count();
    &rest[more..]
}

/// Where the first zero is.
pub(crate) fn find_zero(bytes: &[u8]) -> Option<usize> {
    let (words, rest) = bytes.as_chunks::<WORD>();
    for (index, word) in words.iter().enumerate() {
        if let Some(at) = find_zero_in(u64::from_le_bytes(*word)) {
            return Some(index * WORD + at);
        }
    }
    let found = rest.iter().position(|byte| *byte == 0)?;
    Some(bytes.len() - rest.len() + found)
}

/// Where the first zero of a little-endian word is.
const fn find_zero_in(word: u64) -> Option<usize> {
    const LOW: u64 = u64::from_ne_bytes([0x01; WORD]);
    const HIGH: u64 = u64::from_ne_bytes([0x80; WORD]);
    // The lowest bit that is set belongs to the first byte that is 0; what a borrow sets wrongly comes after it.
    let zeros = word.wrapping_sub(LOW) & !word & HIGH;
    if zeros == 0 { None } else { Some(zeros.trailing_zeros() as usize / 8) }
}

fn code_of(run: usize) -> u8 {
    u8::try_from(run + 1).expect("a run is at most 254 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(plain: &[u8]) -> Vec<u8> {
        let mut out = vec![7; max_encoded_len(plain.len()) + SPARE];
        let len = encode_into(plain, &mut out);
        out.truncate(len);
        out
    }

    #[test]
    fn known_encodings() {
        let run: Vec<u8> = (1..=254).collect();
        let full = [&[255], run.as_slice()].concat();
        let cases: [(&[u8], &[u8]); 7] = [
            (&[], &[1]),
            (&[0], &[1, 1]),
            (&[1], &[2, 1]),
            (&[11, 22, 0, 33], &[3, 11, 22, 2, 33]),
            (&[0, 0, 1, 0], &[1, 1, 2, 1, 1]),
            (&run, &full),
            (&[255, 0], &[2, 255, 1]),
        ];
        for (plain, expected) in cases {
            assert_eq!(encoded(plain), expected, "encoding of {plain:?}");
            let mut buffer = Vec::new();
            assert_eq!(decode(expected, &mut buffer), Some(plain), "decoding of {expected:?}");
        }
    }

    #[test]
    fn zeros_are_found_wherever_they_are() {
        for len in 0..40 {
            assert_eq!(find_zero(&vec![0x81; len]), None);
            for at in 0..len {
                // A byte of 1 behind a zero is what a careless trick with words takes for a zero.
                let mut bytes = vec![1; len];
                bytes[at] = 0;
                assert_eq!(find_zero(&bytes), Some(at), "of {len}");
            }
        }
    }

    #[test]
    fn zeros_at_the_beginning_are_passed_over() {
        for zeros in 0..40 {
            for rest in [&b""[..], b"x", b"x\0", b"\x01\0\0\0\0\0\0\0\0\0"] {
                assert_eq!(after_zeros(&[&vec![0; zeros], rest].concat()), rest, "after {zeros}");
            }
        }
    }

    #[test]
    fn a_run_that_goes_beyond_its_frame_is_refused() {
        assert_eq!(decode(&[5, 1, 2], &mut Vec::new()), None);
        assert_eq!(decode(&[0], &mut Vec::new()), None);
    }

    proptest! {
        #[test]
        fn what_was_encoded_comes_back_without_a_zero_on_the_wire(
            plain in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>(), Just(1u8)], 0..2000), zeros in 0usize..40, before in 0usize..300
        ) {
            let plain = [plain.as_slice(), &vec![0; zeros], &plain].concat();
            let wire = encoded(&plain);
            prop_assert!(!wire.contains(&0));
            prop_assert!(wire.len() <= max_encoded_len(plain.len()));
            let mut buffer = vec![9; before];
            prop_assert_eq!(decode(&wire, &mut buffer), Some(plain.as_slice()));
        }

        #[test]
        fn any_garbage_is_decoded_or_refused_without_a_panic(wire in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = decode(&wire, &mut Vec::new());
        }
    }
}
