//! An archive is read as it was written, and nothing else is.

use std::io::{BufReader, Read};

use kibo_crds::Bytes;
use proptest::prelude::*;

use crate::{ArchiveError, Description, Disk, MAX_DATA, Origin, Prefix, PrefixError, Reader, Record, Writer};

const MIB: u64 = 1 << 20;

fn description(volume: Option<u32>) -> Description {
    let binding = volume.map(|_| serde_json::json!({"claim": "data", "mountPath": "/data"}));
    Description {
        exported_at: "2026-11-30T09:00:00Z".to_owned(),
        origin: Origin { namespace: "team".into(), name: "dev".into(), id: "ws-1".into() },
        labels: [("a".to_owned(), "b".to_owned())].into(),
        spec: serde_json::from_value(serde_json::json!({"template": "t", "volume": binding})).unwrap(),
        root_image: Some("debian-12".to_owned()),
        layer: Bytes::mib(4),
        volume: volume.map(Bytes::mib),
        data: Bytes::mib(1),
    }
}

type Data = Vec<(Disk, u64, Vec<u8>)>;

fn sample() -> Data {
    let noise: Vec<u8> = (0..8192_u32).map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
    vec![
        (Disk::Layer, 0, vec![7; 4096]),
        (Disk::Layer, MIB, noise),
        (Disk::Layer, 3 * MIB, vec![9; MAX_DATA]),
        (Disk::Volume, 4096, vec![1; 4096]),
    ]
}

fn written(data: &Data) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), &Prefix::new(description(Some(2))).unwrap()).unwrap();
    for disk in [Disk::Layer, Disk::Volume] {
        for (_, offset, bytes) in data.iter().filter(|(of, ..)| *of == disk) {
            writer.data(*offset, bytes).unwrap();
        }
        writer.end_disk().unwrap();
    }
    writer.finish().unwrap()
}

fn read(archive: impl Read) -> Result<Data, ArchiveError> {
    let mut reader = Reader::new(BufReader::new(archive))?;
    let (mut data, mut buffer) = (Data::new(), vec![0; MAX_DATA]);
    loop {
        match reader.next(&mut buffer)? {
            Record::Data { disk, offset, length } => data.push((disk, offset, buffer[..length].to_vec())),
            Record::Finished => return Ok(data),
        }
    }
}

#[test]
fn what_was_written_is_read() {
    let archive = written(&sample());
    assert!(archive.len() < 16 << 10, "{} bytes: it is not compressed", archive.len());
    assert_eq!(read(&archive[..]).unwrap(), sample());
    let prefix = Prefix::read(&archive).unwrap().unwrap();
    assert_eq!(prefix.description, description(Some(2)));
    assert_eq!(prefix.id().len(), 64);
    assert_eq!(&archive[..prefix.bytes().len()], prefix.bytes());
}

#[test]
fn a_truncated_archive_is_never_complete() {
    let archive = written(&sample());
    for length in 0..archive.len() {
        let error = read(&archive[..length]).unwrap_err();
        assert!(matches!(error, ArchiveError::Truncated), "{length} of {}: {error}", archive.len());
    }
}

#[test]
fn each_mistake_has_its_error() {
    let archive = written(&sample());
    let changed = |at: usize| {
        let mut archive = archive.clone();
        archive[at] ^= 1;
        archive
    };
    assert!(matches!(read(&changed(0)[..]), Err(ArchiveError::Prefix(PrefixError::NotAnArchive))));
    assert!(matches!(read(&changed(9)[..]), Err(ArchiveError::Prefix(PrefixError::Version(257)))));
    assert!(matches!(read(&changed(15)[..]), Err(ArchiveError::Prefix(PrefixError::TooLong(_)))));
    assert!(matches!(read(&changed(20)[..]), Err(ArchiveError::Prefix(PrefixError::Damaged))));
    let longer = [&archive[..], b"x"].concat();
    assert!(matches!(read(&longer[..]), Err(ArchiveError::Trailing)));
    let twice = [&archive[..], &archive[..]].concat();
    assert!(matches!(read(&twice[..]), Err(ArchiveError::Trailing)));
    // The disks of another archive behind this one's prefix.
    let prefix = Prefix::read(&archive).unwrap().unwrap();
    let other =
        Prefix::new(Description { exported_at: "2025-01-01T00:00:00Z".into(), ..description(Some(2)) }).unwrap();
    let mixed = [other.bytes(), &archive[prefix.bytes().len()..]].concat();
    assert!(matches!(read(&mixed[..]), Err(ArchiveError::Mixed)));
}

#[test]
fn a_description_that_cannot_be_is_refused() {
    let sizes = |layer: u64, volume| Description { layer: Bytes(layer), volume, ..description(None) };
    assert!(matches!(Prefix::new(sizes(0, None)), Err(PrefixError::Size { field: "layer", .. })));
    assert!(matches!(Prefix::new(sizes(MIB + 1, None)), Err(PrefixError::Size { field: "layer", .. })));
    assert!(matches!(Prefix::new(sizes(MIB, Some(Bytes(1)))), Err(PrefixError::Size { field: "volume", .. })));
    assert!(matches!(Prefix::new(sizes(MIB, Some(Bytes::mib(1)))), Err(PrefixError::NoBinding)));
}

#[test]
fn data_stays_within_its_disk_and_in_order() {
    let mut writer = Writer::new(Vec::new(), &Prefix::new(description(None)).unwrap()).unwrap();
    writer.data(4096, &[1; 4096]).unwrap();
    for (offset, length) in
        [(4096, 4096), (0, 4096), (4 * MIB, 4096), (8192, 0), (8192, 100), (8193, 4096), (u64::MAX - 4095, 4096)]
    {
        assert!(writer.data(offset, &vec![0; length]).is_err(), "{length} at {offset}");
    }
    assert!(writer.finish().is_err(), "its disk is not ended");
}

#[test]
fn what_an_input_says_is_no_damage() {
    struct Lost;
    impl Read for Lost {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::ConnectionAborted.into())
        }
    }
    let archive = written(&sample());
    let half = archive.len() / 2;
    assert!(matches!(read(archive[..half].chain(Lost)), Err(ArchiveError::Input(_))));
}

proptest! {
    /// No alteration goes unnoticed but those that mean nothing, such as of a bit that the compression does not use.
    #[test]
    fn an_altered_archive_is_refused(at: prop::sample::Index, by in 1..=255_u8) {
        let mut archive = written(&sample());
        let at = at.index(archive.len());
        archive[at] ^= by;
        prop_assert!(read(&archive[..]).map_or(true, |data| data == sample()), "byte {at}");
    }

    #[test]
    fn nonsense_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        let prefix = Prefix::new(description(Some(2))).unwrap();
        prop_assert!(read(&[prefix.bytes(), &bytes[..]].concat()[..]).is_err());
        prop_assert!(read(&bytes[..]).is_err());
    }
}
