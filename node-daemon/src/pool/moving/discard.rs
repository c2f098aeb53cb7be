//! Removal of a copy that is not the object.
//!
//! What is to be removed is first put aside as a whole, under a name that is never used twice, and only then judged by
//! the records in it. A node that was wrongly taken for dead, and goes on when the object has come back under the same
//! name, so removes nothing: what it has put aside by then says that it is the object, and goes back.

use std::{fs, io, path::Path};

use kibo_crds::{Epoch, ObjectUid};

use crate::{
    durable,
    pool::{Pool, PoolError, image, marker, record_files, records::NotACopy},
};

/// In the directory of the objects: this, the uid, the epoch of the order, and a word of its own.
const PREFIX: &str = ".discard.";
/// Written into what was put aside, so that a network file system asks its server for what else is in it.
const TOUCHED: &str = ".put-aside";

fn aside_name(uid: &ObjectUid, epoch: Epoch) -> String {
    format!("{PREFIX}{uid}.{epoch}.{}", ulid::Ulid::new())
}

/// The epoch of the order that something of this object was put aside for.
fn parse(name: &str, uid: &ObjectUid) -> Option<Epoch> {
    let rest = name.strip_prefix(PREFIX)?.strip_prefix(uid.as_str())?.strip_prefix('.')?;
    rest.split_once('.')?.0.parse().ok().map(Epoch)
}

impl Pool {
    /// Removes what a move left here, if the records say that it is nothing else. What does not exist is removed.
    pub fn discard_copy(&self, uid: &ObjectUid, epoch: Epoch) -> Result<(), PoolError> {
        let _lock = self.begin(uid)?;
        self.discard(uid, epoch)
    }

    /// The same by whoever has the object's lock.
    pub(super) fn discard(&self, uid: &ObjectUid, epoch: Epoch) -> Result<(), PoolError> {
        self.finish_discards(uid)?;
        let dir = self.object_dir(uid);
        if !dir.try_exists().map_err(self.io("find the directory", uid))? {
            return Ok(());
        }
        // The object itself is not put aside even for a moment when that can be seen before.
        if let Err(problem) = self.judge(uid, epoch, &dir)? {
            return Err(PoolError::NotACopy { uid: uid.clone(), pool: self.id.clone(), problem });
        }
        kibo_failpoint::reach_blocking("copy-judged");
        self.put_aside(uid, epoch)
    }

    pub(super) fn put_aside(&self, uid: &ObjectUid, epoch: Epoch) -> Result<(), PoolError> {
        let objects = self.path.join(marker::OBJECTS);
        let aside = objects.join(aside_name(uid, epoch));
        match fs::rename(self.object_dir(uid), &aside) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(self.io("put aside the copy", uid))?,
        }
        durable::sync_dir(&objects).map_err(self.io("sync the directory", uid))?;
        kibo_failpoint::reach_blocking("copy-put-aside");
        self.finish(uid, epoch, &aside)?.map_err(|problem| {
            tracing::warn!(pool = %self.id, object = %uid, %problem, "what was put aside as a copy is the object, and went back");
            PoolError::NotACopy { uid: uid.clone(), pool: self.id.clone(), problem }
        })
    }

    /// Goes on with what daemons that were killed put aside. Everybody judges it in the same way.
    fn finish_discards(&self, uid: &ObjectUid) -> Result<(), PoolError> {
        let objects = self.path.join(marker::OBJECTS);
        let failed = |source| PoolError::List { pool: self.id.clone(), source };
        for entry in fs::read_dir(&objects).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Some(epoch) = entry.file_name().to_str().and_then(|name| parse(name, uid)) else { continue };
            if let Err(problem) = self.finish(uid, epoch, &entry.path())? {
                tracing::warn!(pool = %self.id, object = %uid, %problem, "what was put aside as a copy went back");
            }
        }
        Ok(())
    }

    fn judge(&self, uid: &ObjectUid, epoch: Epoch, dir: &Path) -> Result<Result<(), NotACopy>, PoolError> {
        let has_image = image::size(dir).map_err(self.io("look at the image", uid))?.is_some();
        let records = record_files::list(dir).map_err(self.io("read the holder records", uid))?;
        Ok(records.decide_discard(epoch, has_image))
    }

    /// Removes what was put aside, or gives it its name back when it is the object. Killed anywhere, it is judged again in
    /// the same way: the image goes first, and then the records, the newest last.
    fn finish(&self, uid: &ObjectUid, epoch: Epoch, aside: &Path) -> Result<Result<(), NotACopy>, PoolError> {
        let touched = aside.join(TOUCHED);
        let touch = || fs::File::create(&touched)?.sync_all();
        match touch() {
            // Somebody else has come to its end.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ok(())),
            touched => touched.map_err(self.io("look at what was put aside", uid))?,
        }
        if let Err(problem) = self.judge(uid, epoch, aside)? {
            record_files::remove_if_there(&touched).map_err(self.io("clean up what was put aside", uid))?;
            self.put_back(uid, aside)?;
            return Ok(Err(problem));
        }
        image::remove(aside).map_err(self.io("remove the copy", uid))?;
        kibo_failpoint::reach_blocking("copy-image-removed");
        let records = record_files::list(aside).map_err(self.io("read the holder records", uid))?;
        for epoch in records.settled_below(Epoch(u64::MAX)) {
            record_files::remove(aside, epoch).map_err(self.io("remove the holder records", uid))?;
        }
        kibo_failpoint::reach_blocking("copy-records-removed");
        fs::remove_dir_all(aside).map_err(self.io("remove the directory", uid))?;
        durable::sync_dir(&self.path.join(marker::OBJECTS)).map_err(self.io("sync the directory", uid))?;
        self.status.look_again();
        kibo_failpoint::reach_blocking("copy-removed");
        Ok(Ok(()))
    }

    /// Takes the place of an empty directory only.
    fn put_back(&self, uid: &ObjectUid, aside: &Path) -> Result<(), PoolError> {
        match fs::rename(aside, self.object_dir(uid)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                let problem = format!(
                    "{error}: the object is in {}; when nothing uses it, move its image back by hand",
                    aside.display()
                );
                return Err(self.io("put back the directory", uid)(io::Error::new(error.kind(), problem)));
            }
            Ok(()) => {}
        }
        durable::sync_dir(&self.path.join(marker::OBJECTS)).map_err(self.io("sync the directory", uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_aside_is_found_by_its_object() {
        let uid: ObjectUid = "6f9619ff-8b86-d011-b42d-00c04fc964ff".parse().unwrap();
        let other: ObjectUid = "6f9619ff-8b86-d011-b42d-00c04fc964f0".parse().unwrap();
        let name = aside_name(&uid, Epoch(7));
        assert_eq!(parse(&name, &uid), Some(Epoch(7)));
        assert_eq!(parse(&name, &other), None);
        assert_eq!(parse(uid.as_str(), &uid), None);
        assert!(name.parse::<ObjectUid>().is_err());
        assert_ne!(name, aside_name(&uid, Epoch(7)));
    }
}
