//! What the API says about itself, so that clients and the aggregator find its resources.

use axum::Json;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    APIGroup, APIGroupList, APIResource, APIResourceList, GroupVersionForDiscovery,
};

use kibo_crds::usage;

use super::request::Subresource;

pub const GROUP: &str = "subresources.kibotos.dev";
pub const VERSION: &str = "v1alpha1";

/// `subresources.kibotos.dev/v1alpha1`
pub fn group_version() -> String {
    format!("{GROUP}/{VERSION}")
}

/// `/apis`
pub async fn groups() -> Json<APIGroupList> {
    Json(APIGroupList { groups: vec![api_group()] })
}

/// `/apis/subresources.kibotos.dev`
pub async fn group() -> Json<APIGroup> {
    Json(api_group())
}

/// `/apis/subresources.kibotos.dev/v1alpha1`
pub async fn resources() -> Json<APIResourceList> {
    let resource = |(name, verbs): (&str, &[&str])| APIResource {
        name: name.to_owned(),
        singular_name: String::new(),
        kind: "Workspace".to_owned(),
        group: Some(kibo_crds::GROUP.to_owned()),
        version: Some(kibo_crds::VERSION.to_owned()),
        namespaced: true,
        verbs: verbs.iter().map(|&verb| verb.to_owned()).collect(),
        ..APIResource::default()
    };
    let usages = APIResource {
        name: usage::PLURAL.to_owned(),
        singular_name: "workspaceusage".to_owned(),
        kind: usage::KIND.to_owned(),
        namespaced: true,
        verbs: ["get", "list"].map(str::to_owned).into(),
        ..APIResource::default()
    };
    let resources = Subresource::DISCOVERY.map(resource).into_iter().chain([usages]).collect();
    Json(APIResourceList { group_version: group_version(), resources })
}

fn api_group() -> APIGroup {
    let version = GroupVersionForDiscovery { group_version: group_version(), version: VERSION.to_owned() };
    APIGroup {
        name: GROUP.to_owned(),
        versions: vec![version.clone()],
        preferred_version: Some(version),
        ..APIGroup::default()
    }
}
