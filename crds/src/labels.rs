//! Fixed names that several parts of the system share.

/// API group of all custom resources.
pub const GROUP: &str = "kibotos.dev";
/// The served and stored version.
pub const VERSION: &str = "v1alpha1";
/// Field manager of every write by the operator.
pub const FIELD_MANAGER: &str = "kibo-operator";
/// Keeps a Workspace until nothing of it runs and its writable layer is gone.
pub const WORKSPACE_FINALIZER: &str = "kibotos.dev/workspace";
/// Keeps a Volume while it is bound, and until its image is gone.
pub const VOLUME_FINALIZER: &str = "kibotos.dev/volume";
/// ConfigMap in the operator's namespace that holds the random id of this cluster.
pub const CLUSTER_ID_CONFIG_MAP: &str = "kibotos-cluster-id";

/// Whether a label belongs to the system, and not to the owner of an object.
pub fn is_reserved_label(key: &str) -> bool {
    key.split_once('/').is_some_and(|(prefix, _)| prefix.ends_with(GROUP))
}
