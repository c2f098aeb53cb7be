//! Disks into an archive.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt as _,
};

use kibo_archive::{Description, Prefix, Writer};
use kibo_crds::Bytes;
use tokio_util::sync::CancellationToken;

use super::{Disks, Held, Leave, TransferError, failed};
use crate::{
    launch::Taker,
    pool::{
        Pools,
        image::{self, ImageError},
        opening, sparse,
    },
};

/// An image that is open for reading.
struct Source<'a> {
    held: &'a Held<'a>,
    file: File,
    size: u64,
}

impl<'a> Source<'a> {
    fn open(held: &'a Held<'a>) -> Result<Self, TransferError> {
        let path = held.image();
        let size = image::size(&held.dir()).map_err(failed("look at", &path))?;
        let size = size.ok_or_else(|| ImageError::Missing { path: path.clone() })?;
        if !opening::is_closed(&held.dir()).map_err(failed("look at", &path))? {
            return Err(ImageError::StillOpen { path }.into());
        }
        let (file, _) = sparse::open(&path, OpenOptions::new().read(true))?;
        Ok(Self { held, file, size: size.0 })
    }

    fn data(&self) -> Result<u64, TransferError> {
        sparse::data_bytes(&self.file, 0, self.size).map_err(failed("read", &self.held.image()))
    }

    /// Everything that is neither a hole nor zeros.
    fn write<W: Write>(&self, to: &mut Writer<W>, leave: &Leave<'_>) -> Result<(), TransferError> {
        let path = self.held.image();
        let (mut piece, mut data) = (sparse::Piece::new(), sparse::Data::of(&self.file, 0, self.size));
        while let Some((at, len)) = data.next().map_err(failed("read", &path))? {
            leave.check()?;
            piece.len = len;
            self.file.read_exact_at(piece.bytes_mut(), at).map_err(failed("read", &path))?;
            for (first, last) in sparse::runs(piece.bytes()) {
                to.data(at + first as u64, &piece.bytes()[first..last]).map_err(TransferError::Output)?;
            }
            kibo_failpoint::reach_blocking("export-reading");
        }
        to.end_disk().map_err(TransferError::Output)
    }
}

impl Pools {
    /// Writes an archive of the disks. It is complete only when this returns well: before that, whoever reads it sees
    /// that its end is missing.
    pub fn export(
        &self,
        disks: &Disks,
        description: Description,
        taker: &Taker,
        stop: &CancellationToken,
        to: impl Write,
    ) -> Result<(), TransferError> {
        self.with_taken(disks, taker, |held| {
            let leave = Leave::new(held, stop);
            let sources = held.iter().map(Source::open).collect::<Result<Vec<_>, _>>()?;
            let prefix = Prefix::new(described(description, &sources)?)?;
            let mut writer = Writer::new(to, &prefix).map_err(TransferError::Output)?;
            sources.iter().try_for_each(|source| source.write(&mut writer, &leave))?;
            kibo_failpoint::reach_blocking("export-read");
            // Somebody who took this node for dead may have written while it read.
            leave.check_now()?;
            writer.finish().and_then(|mut to| to.flush()).map_err(TransferError::Output)
        })
    }
}

/// The sizes are what there is: an image may have grown without anybody having heard of it.
fn described(description: Description, sources: &[Source<'_>]) -> Result<Description, TransferError> {
    let data = sources.iter().map(Source::data).sum::<Result<u64, _>>()?;
    let size = |at: usize| sources.get(at).map(|source| Bytes(source.size));
    Ok(Description { layer: size(0).unwrap_or_default(), volume: size(1), data: Bytes(data), ..description })
}
