//! The parts of a local cluster, in the order in which they start.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One process of a local cluster. Ordered as they start; they stop the other way round.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Component {
    Etcd,
    ApiServer,
    ControllerManager,
    Operator,
    /// The daemon of the node with this id.
    Node(String),
}

/// What every local cluster has, with or without nodes.
pub const CONTROL_PLANE: [Component; 3] = [Component::Etcd, Component::ApiServer, Component::ControllerManager];

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Etcd => f.pad("etcd"),
            Self::ApiServer => f.pad("kube-apiserver"),
            Self::ControllerManager => f.pad("kube-controller-manager"),
            Self::Operator => f.pad("kibo-operator"),
            Self::Node(id) => f.pad(&format!("node/{id}")),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no component of a local cluster")]
pub struct UnknownComponent(String);

impl FromStr for Component {
    type Err = UnknownComponent;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "etcd" => Ok(Self::Etcd),
            "kube-apiserver" => Ok(Self::ApiServer),
            "kube-controller-manager" => Ok(Self::ControllerManager),
            "kibo-operator" => Ok(Self::Operator),
            other => match other.strip_prefix("node/") {
                Some(id) => Ok(Self::Node(id.to_owned())),
                None => Err(UnknownComponent(other.to_owned())),
            },
        }
    }
}

impl TryFrom<String> for Component {
    type Error = UnknownComponent;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Component> for String {
    fn from(component: Component) -> Self {
        component.to_string()
    }
}
