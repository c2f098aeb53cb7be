//! What the leader knows of the objects of one kind: one paged quorum list, then the watch and its own
//! committed writes, whichever shows a newer version first. An object never goes back in its version.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
    pin::pin,
    sync::{Arc, RwLock, RwLockReadGuard},
};

use futures::StreamExt as _;
use kube::{
    Api, Resource, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::watch::WatchBackoff;

/// Namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    pub fn of<K: Resource>(object: &K) -> Self {
        Self { namespace: object.meta().namespace.clone().unwrap_or_default(), name: object.name_any() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Something that is kept in step with the objects, such as sums and reverse lookups.
pub trait Projection<K>: Default + Send + Sync {
    fn replace(&mut self, key: &Key, old: Option<&K>, new: Option<&K>);
}

/// Uids of deleted objects, so that the late answer to an own write does not bring one back.
const REMEMBERED_DELETIONS: usize = 4096;

struct Contents<K, P> {
    objects: HashMap<Key, Arc<K>>,
    keys: HashMap<String, Key>,
    projection: P,
    deleted: VecDeque<String>,
}

/// Hears of every change, with the version before and after it, in no particular order between objects.
pub type Listener<K> = Box<dyn Fn(&Key, Option<&K>, Option<&K>) + Send + Sync>;

/// The objects of one kind.
pub struct Cache<K, P> {
    contents: RwLock<Contents<K, P>>,
    listener: Listener<K>,
}

impl<K, P: Default> Cache<K, P> {
    pub fn new(listener: Listener<K>) -> Self {
        let contents = Contents {
            objects: HashMap::new(),
            keys: HashMap::new(),
            projection: P::default(),
            deleted: VecDeque::new(),
        };
        Self { contents: RwLock::new(contents), listener }
    }
}

/// Versions of one object are comparable numbers (Kubernetes 1.35 promises it; etcd always did so).
fn version<K: Resource>(object: &K) -> u128 {
    object.meta().resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

impl<K: Resource + Clone, P: Projection<K>> Cache<K, P> {
    fn read(&self) -> RwLockReadGuard<'_, Contents<K, P>> {
        self.contents.read().expect("no holder of this lock panics")
    }

    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.read().objects.get(key).cloned()
    }

    pub fn by_uid(&self, uid: &str) -> Option<Arc<K>> {
        let contents = self.read();
        contents.keys.get(uid).and_then(|key| contents.objects.get(key)).cloned()
    }

    pub fn keys(&self) -> Vec<Key> {
        self.read().objects.keys().cloned().collect()
    }

    fn uids(&self) -> Vec<(String, Key)> {
        self.read().keys.iter().map(|(uid, key)| (uid.clone(), key.clone())).collect()
    }

    /// Looks at the projection; keep it short, writers wait.
    pub fn project<T>(&self, look: impl FnOnce(&P) -> T) -> T {
        look(&self.read().projection)
    }

    /// The same, with the objects by their uids.
    pub fn project_with<T>(&self, look: impl FnOnce(&P, &dyn Fn(&str) -> Option<Arc<K>>) -> T) -> T {
        let contents = self.read();
        let by_uid = |uid: &str| contents.keys.get(uid).and_then(|key| contents.objects.get(key)).cloned();
        look(&contents.projection, &by_uid)
    }

    /// Takes in a version of an object. Returns whether it is newer than what was known.
    pub fn observe(&self, mut object: K) -> bool {
        object.meta_mut().managed_fields = None;
        let (key, uid) = (Key::of(&object), object.uid().unwrap_or_default());
        let mut guard = self.contents.write().expect("no holder of this lock panics");
        let contents = &mut *guard;
        let old = contents.objects.get(&key).cloned();
        let same = old.as_ref().is_some_and(|old| old.uid().as_deref() == Some(uid.as_str()));
        if contents.deleted.contains(&uid) || old.as_ref().is_some_and(|old| version(&**old) >= version(&object)) {
            return false;
        }
        if let Some(old) = old.as_ref().filter(|_| !same) {
            contents.keys.remove(&old.uid().unwrap_or_default());
        }
        let object = Arc::new(object);
        contents.projection.replace(&key, old.as_deref(), Some(&object));
        contents.keys.insert(uid, key.clone());
        contents.objects.insert(key.clone(), object.clone());
        drop(guard);
        (self.listener)(&key, old.as_deref(), Some(&object));
        true
    }

    /// The object with this uid is gone for good.
    pub fn forget(&self, key: &Key, uid: &str) -> bool {
        let mut guard = self.contents.write().expect("no holder of this lock panics");
        let contents = &mut *guard;
        let Some(old) = contents.objects.get(key).filter(|old| old.uid().as_deref() == Some(uid)).cloned() else {
            return false;
        };
        contents.objects.remove(key);
        contents.keys.remove(uid);
        contents.projection.replace(key, Some(&old), None);
        contents.deleted.push_back(uid.to_owned());
        if contents.deleted.len() > REMEMBERED_DELETIONS {
            contents.deleted.pop_front();
        }
        drop(guard);
        (self.listener)(key, Some(&old), None);
        true
    }
}

/// Feeds a cache from a list and a watch, until it is dropped. The list is paged and a quorum read; it is
/// repeated when the watch was cut off for too long. `listed` is told when one was taken in: from the
/// first on the cache knows everything. Errors are logged and tried again with a backoff.
pub async fn feed<K, P>(api: Api<K>, cache: Arc<Cache<K, P>>, listed: watch::Sender<bool>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static,
    P: Projection<K> + 'static,
{
    let mut seen: HashSet<String> = HashSet::new();
    // What was known before the list was asked for: an own creation after that is not in it, and stays.
    let mut known: Vec<(String, Key)> = Vec::new();
    let mut events = pin!(watcher(api, watcher::Config::default()).backoff(WatchBackoff::default()));
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => {
                seen.clear();
                known = cache.uids();
            }
            Ok(watcher::Event::InitApply(object)) => {
                seen.insert(object.uid().unwrap_or_default());
                cache.observe(object);
            }
            Ok(watcher::Event::InitDone) => {
                forget_unlisted(&cache, &std::mem::take(&mut known), &std::mem::take(&mut seen));
                listed.send_replace(true);
            }
            Ok(watcher::Event::Apply(object)) => {
                cache.observe(object);
            }
            Ok(watcher::Event::Delete(object)) => {
                cache.forget(&Key::of(&object), &object.uid().unwrap_or_default());
            }
            Err(error) => {
                tracing::warn!(kind = %K::kind(&()), %error, "the watch failed and is tried again");
            }
        }
    }
}

/// Objects that were known before a later complete list, and that it does not show, were deleted while
/// nobody watched.
fn forget_unlisted<K: Resource + Clone, P: Projection<K>>(
    cache: &Cache<K, P>,
    known: &[(String, Key)],
    listed: &HashSet<String>,
) {
    for (uid, key) in known.iter().filter(|(uid, _)| !listed.contains(uid)) {
        cache.forget(key, uid);
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::{Volume, volume::VolumeSpec};

    use super::*;

    #[derive(Default)]
    struct Count(usize);

    impl Projection<Volume> for Count {
        fn replace(&mut self, _: &Key, old: Option<&Volume>, new: Option<&Volume>) {
            self.0 = self.0 + usize::from(new.is_some()) - usize::from(old.is_some());
        }
    }

    fn volume(uid: &str, version: u64) -> Volume {
        let mut volume = Volume::new("data", VolumeSpec { size: "1Gi".parse().unwrap(), pool: None, r#move: None });
        volume.metadata.namespace = Some("default".into());
        volume.metadata.uid = Some(uid.into());
        volume.metadata.resource_version = Some(version.to_string());
        volume
    }

    #[test]
    fn an_object_never_goes_back() {
        let cache: Cache<Volume, Count> = Cache::new(Box::new(|_, _, _| {}));
        assert!(cache.observe(volume("u1", 10)));
        assert!(!cache.observe(volume("u1", 9)));
        assert!(!cache.observe(volume("u1", 10)));
        assert!(cache.observe(volume("u1", 100)));
        assert_eq!(cache.project(|count| count.0), 1);
    }

    #[test]
    fn what_was_made_while_a_list_was_on_its_way_stays() {
        let cache: Cache<Volume, Count> = Cache::new(Box::new(|_, _, _| {}));
        cache.observe(volume("u1", 10));
        let known = cache.uids();
        assert!(cache.observe(volume("u2", 12)), "its successor, made after the list was asked for");
        forget_unlisted(&cache, &known, &HashSet::new());
        assert!(cache.by_uid("u2").is_some());
        assert!(cache.observe(volume("u2", 13)), "and its watch is believed");
    }

    #[test]
    fn a_late_answer_does_not_bring_a_deleted_object_back() {
        let cache: Cache<Volume, Count> = Cache::new(Box::new(|_, _, _| {}));
        let key = Key::new("default", "data");
        cache.observe(volume("u1", 10));
        assert!(cache.forget(&key, "u1"));
        assert!(!cache.observe(volume("u1", 11)));
        assert!(cache.observe(volume("u2", 12)), "a successor of the same name is another object");
        assert!(!cache.forget(&key, "u1"));
        assert_eq!(cache.by_uid("u2").map(|found| Key::of(&*found)), Some(key));
        assert_eq!(cache.project(|count| count.0), 1);
    }
}
