//! Consistent overhead byte stuffing (Cheshire and Baker, 1999): encoded bytes are never 0, so a 0 on the wire is always
//! the end of a frame, whatever came before it.
//!
//! By hand because the crates for it go byte by byte through a state machine, which an emulated guest feels; this copies
//! whole runs.

/// The longest run between two code bytes.
const MAX_RUN: usize = 254;

/// The most bytes that `len` plain bytes become.
pub const fn max_encoded_len(len: usize) -> usize {
    len + len / MAX_RUN + 1
}

/// Appends the encoded form of `plain`, without the ending 0.
pub fn encode(plain: &[u8], out: &mut Vec<u8>) {
    out.reserve(max_encoded_len(plain.len()));
    let mut rest = plain;
    loop {
        let window = &rest[..rest.len().min(MAX_RUN)];
        match memchr::memchr(0, window) {
            Some(run) => {
                out.push(code(run));
                out.extend_from_slice(&rest[..run]);
                rest = &rest[run + 1..];
            }
            // No zero within reach: a full run stands for itself, a shorter one ends the frame.
            None if window.len() == MAX_RUN => {
                out.push(code(MAX_RUN));
                out.extend_from_slice(window);
                rest = &rest[MAX_RUN..];
                if rest.is_empty() {
                    return;
                }
            }
            None => {
                out.push(code(window.len()));
                out.extend_from_slice(window);
                return;
            }
        }
    }
}

/// Replaces `encoded` (without the ending 0) by what it stands for; `None` when it is no encoding of anything.
pub fn decode(encoded: &mut [u8]) -> Option<&[u8]> {
    let (mut read, mut write) = (0, 0);
    while read < encoded.len() {
        let code = usize::from(encoded[read]);
        let run = code.checked_sub(1)?;
        let end = read + code;
        if end > encoded.len() {
            return None;
        }
        encoded.copy_within(read + 1..end, write);
        write += run;
        read = end;
        if run < MAX_RUN && read < encoded.len() {
            encoded[write] = 0;
            write += 1;
        }
    }
    Some(&encoded[..write])
}

fn code(run: usize) -> u8 {
    u8::try_from(run + 1).expect("a run is at most 254 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(plain: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        encode(plain, &mut out);
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
            assert_eq!(decode(&mut expected.to_vec()), Some(plain), "decoding of {expected:?}");
        }
    }

    #[test]
    fn a_run_that_goes_beyond_its_frame_is_refused() {
        assert_eq!(decode(&mut [5, 1, 2]), None);
        assert_eq!(decode(&mut [0]), None);
    }

    proptest! {
        #[test]
        fn what_was_encoded_comes_back_without_a_zero_on_the_wire(
            plain in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>(), Just(7u8)], 0..2000)
        ) {
            let mut wire = encoded(&plain);
            prop_assert!(!wire.contains(&0));
            prop_assert!(wire.len() <= max_encoded_len(plain.len()));
            prop_assert_eq!(decode(&mut wire), Some(plain.as_slice()));
        }

        #[test]
        fn any_garbage_is_decoded_or_refused_without_a_panic(mut wire in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = decode(&mut wire);
        }
    }
}
