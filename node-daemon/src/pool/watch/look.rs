//! One look at a pool.

use std::collections::BTreeMap;

use kibo_crds::{NodeId, ObjectUid, PoolId};

use super::{
    Place,
    decide::{Dead, FenceSeen},
};
use crate::pool::{fence, marker, record_files, records::Records};

/// Reads one pool.
pub struct Looker {
    pub place: Place,
    pub node: NodeId,
}

impl Looker {
    pub fn id(&self) -> &PoolId {
        &self.place.id
    }

    /// The fence file first: what is marked there need not wait for the records of many objects.
    pub fn look<'u>(
        &self,
        objects: impl Iterator<Item = &'u ObjectUid>,
    ) -> (FenceSeen, BTreeMap<ObjectUid, Result<Records, String>>) {
        let fence = self.fence();
        let records = objects.map(|uid| {
            let dir = self.place.path.join(marker::OBJECTS).join(uid.as_str());
            (uid.clone(), record_files::list(&dir).map_err(|error| error.to_string()))
        });
        (fence, records.collect())
    }

    fn fence(&self) -> FenceSeen {
        let marker = marker::read(&self.place.path, &self.place.id).map_err(|error| error.to_string())?;
        let uid = self.place.uid.get_or_init(|| marker.uid.clone());
        if *uid != marker.uid {
            let (path, expected, found) = (self.place.path.clone(), uid.clone(), marker.uid);
            return Err(marker::MarkerError::OtherUid { path, expected, found }.to_string());
        }
        let read = fence::read(&self.place.path, &self.node).map_err(|error| error.to_string())?;
        let fence = read.ok_or_else(|| "this node's fence file is gone".to_owned())?;
        let mark = fence.mark.map_err(|error| error.to_string())?;
        Ok(mark.map(|mark| Dead { incarnation: mark.incarnation, unix_millis: mark.unix_millis }))
    }
}
