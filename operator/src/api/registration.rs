//! How the API server in front finds this one: an APIService, a Service, and the leader's address behind it.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::{
    ByteString,
    api::{
        core::v1::{Service, ServicePort, ServiceSpec},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    kube_aggregator::pkg::apis::apiregistration::v1::{APIService, APIServiceSpec, ServiceReference},
};
use kibo_crds::FIELD_MANAGER;
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams},
};
use serde::{Serialize, de::DeserializeOwned};

use super::discovery::{GROUP, VERSION};

/// Of the Service in front of the operator; its certificate must be for `kibotos-operator.<namespace>.svc`.
pub const SERVICE: &str = "kibotos-operator";
const LEADER_SLICE: &str = "kibotos-operator-leader";
/// What the Service of an installation listens on.
const SERVICE_PORT: i32 = 443;

/// How the API server in front reaches this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// By this name, on the port that is listened on: where no Service is routed, as in a local cluster.
    ExternalName(String),
    /// By the installation's Service, which has no selector: the leader puts its own address behind it, so that
    /// requests and sessions come to the one replica that can serve them.
    Leader(IpAddr),
    /// By the installation's Service as it is.
    Service,
}

/// What of this process can be reached.
#[derive(Clone, Copy, Debug)]
pub struct Listening {
    pub api: SocketAddr,
    pub session: SocketAddr,
}

/// An object that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot apply {kind} {name}: {source}")]
pub struct ApplyError {
    kind: String,
    name: String,
    source: Box<kube::Error>,
}

/// Writes everything that is needed. May be repeated.
pub async fn apply(
    client: &Client,
    namespace: &str,
    ca_pem: &str,
    reach: &Reach,
    listening: Listening,
) -> Result<(), ApplyError> {
    match reach {
        Reach::ExternalName(host) => {
            let services = Api::namespaced(client.clone(), namespace);
            apply_one(&services, SERVICE, &external_service(host, listening.api.port())).await?;
        }
        Reach::Leader(address) => {
            let slices = Api::namespaced(client.clone(), namespace);
            apply_one(&slices, LEADER_SLICE, &leader_slice(*address, listening)).await?;
        }
        Reach::Service => {}
    }
    let service = api_service(namespace, ca_pem, reach, listening.api.port());
    let name = service.metadata.name.clone().unwrap_or_default();
    apply_one(&Api::<APIService>::all(client.clone()), &name, &service).await
}

async fn apply_one<K>(api: &Api<K>, name: &str, object: &K) -> Result<(), ApplyError>
where
    K: Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + std::fmt::Debug,
{
    let params = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch(name, &params, &Patch::Apply(object)).await {
        Ok(_) => {
            tracing::info!(kind = %K::kind(&()), name, "applied");
            Ok(())
        }
        Err(source) => {
            let (kind, name) = (K::kind(&()).into_owned(), name.to_owned());
            Err(ApplyError { kind, name, source: Box::new(source) })
        }
    }
}

fn named(name: &str) -> ObjectMeta {
    let labels = [("app.kubernetes.io/part-of", "kibotos"), ("app.kubernetes.io/component", "operator")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..ObjectMeta::default() }
}

fn api_service(namespace: &str, ca_pem: &str, reach: &Reach, port: u16) -> APIService {
    let port = if matches!(reach, Reach::ExternalName(_)) { i32::from(port) } else { SERVICE_PORT };
    APIService {
        metadata: named(&format!("{VERSION}.{GROUP}")),
        spec: Some(APIServiceSpec {
            group: Some(GROUP.to_owned()),
            version: Some(VERSION.to_owned()),
            group_priority_minimum: 1000,
            version_priority: 15,
            ca_bundle: Some(ByteString(ca_pem.as_bytes().to_vec())),
            service: Some(ServiceReference {
                namespace: Some(namespace.to_owned()),
                name: Some(SERVICE.to_owned()),
                port: Some(port),
            }),
            insecure_skip_tls_verify: None,
        }),
        status: None,
    }
}

fn external_service(host: &str, port: u16) -> Service {
    Service {
        metadata: named(SERVICE),
        spec: Some(ServiceSpec {
            type_: Some("ExternalName".to_owned()),
            external_name: Some(host.to_owned()),
            ports: Some(vec![ServicePort {
                name: Some("api".to_owned()),
                port: i32::from(port),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

fn leader_slice(address: IpAddr, listening: Listening) -> EndpointSlice {
    let mut metadata = named(LEADER_SLICE);
    let labels = metadata.labels.get_or_insert_default();
    labels.insert("kubernetes.io/service-name".to_owned(), SERVICE.to_owned());
    labels.insert("endpointslice.kubernetes.io/managed-by".to_owned(), FIELD_MANAGER.to_owned());
    let port = |name: &str, at: SocketAddr| EndpointPort {
        name: Some(name.to_owned()),
        port: Some(i32::from(at.port())),
        protocol: Some("TCP".to_owned()),
        ..EndpointPort::default()
    };
    EndpointSlice {
        metadata,
        address_type: if address.is_ipv4() { "IPv4" } else { "IPv6" }.to_owned(),
        endpoints: vec![Endpoint {
            addresses: vec![address.to_string()],
            conditions: Some(EndpointConditions { ready: Some(true), ..EndpointConditions::default() }),
            ..Endpoint::default()
        }],
        ports: Some(vec![port("api", listening.api), port("session", listening.session)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening() -> Listening {
        Listening { api: "127.0.0.1:7444".parse().unwrap(), session: "127.0.0.1:7443".parse().unwrap() }
    }

    #[test]
    fn the_front_server_is_sent_where_the_operator_listens() {
        let port = |reach| api_service("kibotos-system", "PEM", &reach, 7444).spec.unwrap().service.unwrap().port;
        assert_eq!(port(Reach::ExternalName("localhost".to_owned())), Some(7444));
        assert_eq!(port(Reach::Service), Some(443));
        let service = external_service("localhost", 7444).spec.unwrap();
        assert_eq!(service.external_name.as_deref(), Some("localhost"));
        assert_eq!(service.ports.unwrap()[0].port, 7444);
    }

    #[test]
    fn behind_the_service_stands_the_leader_alone() {
        let slice = leader_slice("10.0.0.7".parse().unwrap(), listening());
        assert_eq!(slice.endpoints.iter().flat_map(|e| e.addresses.clone()).collect::<Vec<_>>(), ["10.0.0.7"]);
        let ports: Vec<_> = slice.ports.unwrap().into_iter().map(|port| (port.name.unwrap(), port.port)).collect();
        assert_eq!(ports, [("api".to_owned(), Some(7444)), ("session".to_owned(), Some(7443))]);
        let labels = slice.metadata.labels.unwrap();
        assert_eq!(labels.get("kubernetes.io/service-name").map(String::as_str), Some(SERVICE));
    }
}
