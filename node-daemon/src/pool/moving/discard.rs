//! Removal of a copy that is not the object.
//!
//! What is to be removed is first put aside as a whole, under a name that is never used twice, and only then judged by
//! the records in it. A node that was wrongly taken for dead, and goes on when the object has come back under the same
//! name, so removes nothing: what it has put aside by then says that it is the object, and goes back. Should it end before
//! it has given that back, whoever misses the object looks for it here.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

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

/// Of what object something was put aside, and the epoch of the order.
fn parse(name: &str) -> Option<(ObjectUid, Epoch)> {
    let (uid, rest) = name.strip_prefix(PREFIX)?.split_once('.')?;
    let (epoch, _) = rest.split_once('.')?;
    Some((uid.parse().ok()?, Epoch(epoch.parse().ok()?)))
}

/// The object of which a directory of this name was put aside.
pub fn object_of_aside(name: &str) -> Option<ObjectUid> {
    parse(name).map(|(uid, _)| uid)
}

/// What was put aside of an object, and the epochs of the orders.
pub fn asides(objects: &Path, uid: &ObjectUid) -> io::Result<Vec<(Epoch, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(objects)? {
        let entry = entry?;
        match entry.file_name().to_str().and_then(parse) {
            Some((of, epoch)) if of == *uid => found.push((epoch, entry.path())),
            _ => {}
        }
    }
    Ok(found)
}

fn judge(dir: &Path, epoch: Epoch) -> io::Result<Result<(), NotACopy>> {
    let has_image = image::size(dir)?.is_some();
    Ok(record_files::list(dir)?.decide_discard(epoch, has_image))
}

/// Whether what was put aside would go back. `false` also when it has gone meanwhile.
pub fn is_the_object(aside: &Path) -> io::Result<bool> {
    let epoch = aside.file_name().and_then(|name| name.to_str()).and_then(parse).map(|(_, epoch)| epoch);
    let is_there = aside.try_exists()?;
    epoch.filter(|_| is_there).map_or(Ok(false), |epoch| judge(aside, epoch).map(|judged| judged.is_err()))
}

/// `false`: somebody else has come to its end.
fn touch(aside: &Path) -> io::Result<bool> {
    match fs::File::create(aside.join(TOUCHED)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        file => file?.sync_all().map(|()| true),
    }
}

/// Takes the place of an empty directory only.
fn put_back(objects: &Path, uid: &ObjectUid, aside: &Path) -> io::Result<()> {
    record_files::remove_if_there(&aside.join(TOUCHED))?;
    match fs::rename(aside, objects.join(uid.as_str())) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => {
            let problem = format!(
                "{error}: the object is in {}; when nothing uses it, move its files back by hand and remove that directory",
                aside.display()
            );
            Err(io::Error::new(error.kind(), problem))
        }
        Ok(()) => durable::sync_dir(objects),
    }
}

/// Gives the object its name back where somebody who was slow to die has put it aside. A copy is left where it is.
pub fn put_back_objects(objects: &Path, uid: &ObjectUid) -> io::Result<()> {
    for (epoch, aside) in asides(objects, uid)? {
        if !touch(&aside)? {
            continue;
        }
        if let Err(problem) = judge(&aside, epoch)? {
            tracing::warn!(object = %uid, %problem, "what was put aside as a copy is the object, and goes back");
            put_back(objects, uid, &aside)?;
        }
    }
    Ok(())
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
        if let Err(problem) = judge(&dir, epoch).map_err(self.io("look at the directory", uid))? {
            return Err(PoolError::NotACopy { uid: uid.clone(), pool: self.id.clone(), problem });
        }
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

    /// Where the image is missing: whoever was to remove a copy may have put aside the object, and have ended before it
    /// gave that back. By whoever has the object's lock.
    pub(in crate::pool) fn find_again(&self, uid: &ObjectUid) -> Result<(), PoolError> {
        match image::size(&self.object_dir(uid)).map_err(self.io("look at the image", uid))? {
            Some(_) => Ok(()),
            None => self.finish_discards(uid),
        }
    }

    /// Goes on with what daemons that were killed put aside. Everybody judges it in the same way.
    fn finish_discards(&self, uid: &ObjectUid) -> Result<(), PoolError> {
        let failed = |source| PoolError::List { pool: self.id.clone(), source };
        for (epoch, aside) in asides(&self.path.join(marker::OBJECTS), uid).map_err(failed)? {
            if let Err(problem) = self.finish(uid, epoch, &aside)? {
                tracing::warn!(pool = %self.id, object = %uid, %problem, "what was put aside as a copy went back");
            }
        }
        Ok(())
    }

    /// Removes what was put aside, or gives it its name back when it is the object. Killed anywhere, it is judged again in
    /// the same way: the image goes first, and then the records, the newest last.
    fn finish(&self, uid: &ObjectUid, epoch: Epoch, aside: &Path) -> Result<Result<(), NotACopy>, PoolError> {
        if !touch(aside).map_err(self.io("look at what was put aside", uid))? {
            return Ok(Ok(()));
        }
        let objects = self.path.join(marker::OBJECTS);
        if let Err(problem) = judge(aside, epoch).map_err(self.io("look at what was put aside", uid))? {
            put_back(&objects, uid, aside).map_err(self.io("put back the directory", uid))?;
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
        durable::sync_dir(&objects).map_err(self.io("sync the directory", uid))?;
        self.status.look_again();
        kibo_failpoint::reach_blocking("copy-removed");
        Ok(Ok(()))
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
        assert_eq!(parse(&name), Some((uid.clone(), Epoch(7))));
        assert_eq!(parse(uid.as_str()), None);
        let objects = tempfile::tempdir().unwrap();
        fs::create_dir(objects.path().join(&name)).unwrap();
        assert_eq!(asides(objects.path(), &uid).unwrap(), [(Epoch(7), objects.path().join(&name))]);
        assert_eq!(asides(objects.path(), &other).unwrap(), []);
        assert!(name.parse::<ObjectUid>().is_err());
        assert_ne!(name, aside_name(&uid, Epoch(7)));
    }
}
