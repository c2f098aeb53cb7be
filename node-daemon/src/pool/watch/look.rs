//! One look at a pool.

use std::{collections::BTreeMap, io};

use kibo_crds::{NodeId, ObjectUid, PoolId};

use super::{
    Place,
    decide::{Dead, FenceSeen, Holding},
};
use crate::pool::{fence, marker, moving, record_files, records::Records};

/// Reads one pool.
pub struct Looker {
    pub place: Place,
    pub node: NodeId,
}

impl Looker {
    pub fn id(&self) -> &PoolId {
        &self.place.id
    }

    /// The records of each of a holding's objects. One that has none any more may have been put aside, and is put back.
    pub fn records(&self, holding: &Holding) -> BTreeMap<ObjectUid, Result<Records, String>> {
        let objects = self.place.path.join(marker::OBJECTS);
        let read = |uid: &ObjectUid| {
            let dir = objects.join(uid.as_str());
            let records = record_files::list(&dir)?;
            if !records.0.is_empty() {
                return Ok(records);
            }
            moving::put_back_objects(&objects, uid)?;
            record_files::list(&dir)
        };
        let records = holding
            .objects
            .iter()
            .map(|(uid, _)| (uid.clone(), read(uid).map_err(|error: io::Error| error.to_string())));
        records.collect()
    }

    /// What this node's fence file says, read afresh.
    pub fn fence(&self) -> FenceSeen {
        let nothing = |problem| FenceSeen { dead: None, problem: Some(problem) };
        match self.read_fence() {
            Err(problem) => nothing(problem),
            Ok(None) => nothing("this node's fence file is gone".to_owned()),
            Ok(Some(fence)) => FenceSeen {
                dead: fence.highest.map(|mark| Dead { incarnation: mark.incarnation, unix_millis: mark.unix_millis }),
                problem: fence.mark.err().map(|error| error.to_string()),
            },
        }
    }

    fn read_fence(&self) -> Result<Option<fence::Fence>, String> {
        let marker = marker::read(&self.place.path, &self.place.id).map_err(|error| error.to_string())?;
        let uid = self.place.uid.get_or_init(|| marker.uid.clone());
        if *uid != marker.uid {
            let (path, expected, found) = (self.place.path.clone(), uid.clone(), marker.uid);
            return Err(marker::MarkerError::OtherUid { path, expected, found }.to_string());
        }
        fence::read(&self.place.path, &self.node).map_err(|error| error.to_string())
    }
}
