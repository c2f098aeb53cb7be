use super::*;
use proptest::prelude::*;

const NONCE: Nonce = Nonce::new(0x0102_0300_0506_0708);

/// With the one checksum or the other, as the payload has it.
fn wire(payload: &[u8]) -> Vec<u8> {
    let check = if payload.len().is_multiple_of(2) { Check::Sum } else { Check::Crc };
    let mut wire = Vec::new();
    encode(Direction::FromGuest, NONCE, check, payload, &mut wire).expect("short enough");
    wire
}

fn decoded(decoder: &mut Decoder, bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    decoder.feed(bytes, |frame: Frame<'_>| payloads.push(frame.payload.to_vec()));
    payloads
}

fn decoder() -> Decoder {
    Decoder::new(Direction::FromGuest)
}

#[test]
fn a_frame_carries_its_nonce_and_payload() {
    let mut frames = Vec::new();
    decoder().feed(&wire(b"payload"), |frame: Frame<'_>| frames.push((frame.nonce, frame.payload.to_vec())));
    assert_eq!(frames, [(NONCE, b"payload".to_vec())]);
}

#[test]
fn half_a_frame_does_not_spoil_the_one_after_the_delimiter() {
    let half = &wire(&[9; 5000])[..2000];
    let stream = [half, &[DELIMITER], &wire(b"next")].concat();
    let mut decoder = decoder();
    assert_eq!(decoded(&mut decoder, &stream), [b"next"]);
    assert_eq!(decoder.broken(), 1);
}

#[test]
fn a_frame_of_the_other_direction_is_dropped() {
    let mut echo = Vec::new();
    encode(Direction::FromHost, NONCE, Check::Sum, b"mine", &mut echo).expect("short enough");
    assert_eq!(decoded(&mut decoder(), &echo), [] as [Vec<u8>; 0]);
}

#[test]
fn the_longest_message_fits_and_a_longer_one_is_refused() {
    for byte in [0, 1] {
        let longest = vec![byte; MAX_MESSAGE];
        assert_eq!(decoded(&mut decoder(), &wire(&longest)), [longest]);
    }
    let result = encode(Direction::FromGuest, NONCE, Check::Crc, &vec![1; MAX_MESSAGE + 1], &mut Vec::new());
    assert_eq!(result, Err(TooLong { len: MAX_MESSAGE + 1 }));
}

#[test]
fn endless_garbage_without_a_delimiter_takes_no_memory() {
    let mut decoder = decoder();
    for _ in 0..200 {
        assert_eq!(decoded(&mut decoder, &[3; 16 * 1024]), [] as [Vec<u8>; 0]);
        assert!(decoder.partial.capacity() <= 2 * MAX_WIRE);
    }
    assert_eq!(decoded(&mut decoder, &[&[DELIMITER], wire(b"after").as_slice()].concat()), [b"after"]);
}

proptest! {
    #[test]
    fn frames_are_found_whatever_the_pieces_they_arrive_in(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..8),
        pieces in prop::collection::vec(1usize..70, 1..40),
    ) {
        let stream: Vec<u8> = payloads.iter().flat_map(|payload| wire(payload)).collect();
        let (mut decoder, mut found, mut rest) = (decoder(), Vec::new(), stream.as_slice());
        for piece in pieces.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*piece).min(rest.len()));
            found.extend(decoded(&mut decoder, now));
            rest = later;
        }
        prop_assert_eq!(found, payloads);
        prop_assert_eq!(decoder.broken(), 0);
    }

    #[test]
    fn garbage_between_frames_costs_no_frame_that_starts_after_a_delimiter(
        payloads in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..100), prop::collection::vec(any::<u8>(), 0..100)), 1..8),
    ) {
        let mut stream = Vec::new();
        for (garbage, payload) in &payloads {
            stream.extend_from_slice(garbage);
            stream.push(DELIMITER);
            stream.extend_from_slice(&wire(payload));
        }
        let expected: Vec<_> = payloads.into_iter().map(|(_, payload)| payload).collect();
        prop_assert_eq!(decoded(&mut decoder(), &stream), expected);
    }

    #[test]
    fn a_corrupted_byte_never_yields_another_payload(
        payload in prop::collection::vec(any::<u8>(), 0..300), at in any::<prop::sample::Index>(), flip in 1u8..,
    ) {
        let mut stream = wire(&payload);
        let at = at.index(stream.len() - 1);
        stream[at] ^= flip;
        stream.push(DELIMITER);
        stream.extend(wire(b"intact"));
        prop_assert_eq!(decoded(&mut decoder(), &stream), [b"intact"]);
    }

    #[test]
    fn a_cut_frame_never_yields_a_payload(payload in prop::collection::vec(any::<u8>(), 0..300), cut in any::<prop::sample::Index>()) {
        let mut stream = wire(&payload);
        stream.truncate(cut.index(stream.len() - 1));
        stream.push(DELIMITER);
        prop_assert_eq!(decoded(&mut decoder(), &stream), [] as [Vec<u8>; 0]);
    }
}
