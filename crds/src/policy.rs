//! What CEL in a schema cannot do: refuse deletes (ValidatingAdmissionPolicies), and give a new object its finalizer
//! (a MutatingAdmissionPolicy).

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use kube::{
    core::{DynamicObject, GroupVersionKind},
    discovery::ApiResource,
};

use crate::WORKSPACE_FINALIZER;

/// A policy with the binding that puts it in force.
pub struct Policy {
    pub policy: ValidatingAdmissionPolicy,
    pub binding: ValidatingAdmissionPolicyBinding,
}

/// All policies, in the order in which they are applied.
pub fn all() -> Vec<Policy> {
    vec![
        refuse_delete(
            "kibotos-keep-admitted-nodes",
            "nodes",
            "!has(oldObject.status) || !has(oldObject.status.admission) || oldObject.status.admission == 'Pending' || (oldObject.status.admission == 'Revoked' && !has(oldObject.status.keyHash))",
            "'Node ' + oldObject.metadata.name + ' was admitted, and its registration is kept for ever, since records refer to it: retire it instead (spec.retirement)'",
        ),
        refuse_delete(
            "kibotos-keep-storage-pools",
            "storagepools",
            "!has(oldObject.spec.lost) && (!has(oldObject.status) || ((!has(oldObject.status.members) || size(oldObject.status.members) == 0) && (!has(oldObject.status.objects) || oldObject.status.objects == 0)))",
            "'StoragePool ' + oldObject.metadata.name + ' was declared lost, has members or has objects, and is kept: it says which disk is meant by this id, and that a lost one is not to be used again'",
        ),
        refuse_delete(
            "kibotos-keep-default-overcommit-policy",
            "overcommitpolicies",
            "oldObject.metadata.name != 'default'",
            "'the default OvercommitPolicy cannot be deleted: set its ratios to 1 instead'",
        ),
    ]
}

/// An object of a kind that older API servers do not have.
pub struct Optional {
    pub resource: ApiResource,
    pub object: DynamicObject,
}

/// A Workspace is the operator's own from its creation on, which spares a write for each. Kubernetes has the kind since
/// 1.36. It is allowed to fail: a Workspace that came without the finalizer gets it from the operator.
pub fn own_new_workspaces() -> [Optional; 2] {
    const NAME: &str = "kibotos-own-new-workspaces";
    let add = format!(
        "has(object.metadata.finalizers) \
         ? [JSONPatch{{op: 'add', path: '/metadata/finalizers/-', value: '{WORKSPACE_FINALIZER}'}}] \
         : [JSONPatch{{op: 'add', path: '/metadata/finalizers', value: ['{WORKSPACE_FINALIZER}']}}]"
    );
    let is_missing =
        format!("!has(object.metadata.finalizers) || !('{WORKSPACE_FINALIZER}' in object.metadata.finalizers)");
    let policy = serde_json::json!({
        "failurePolicy": "Ignore",
        "reinvocationPolicy": "Never",
        "matchConstraints": { "resourceRules": [{
            "apiGroups": [crate::GROUP],
            "apiVersions": ["*"],
            "operations": ["CREATE"],
            "resources": ["workspaces"],
        }]},
        "matchConditions": [{ "name": "finalizer-is-missing", "expression": is_missing }],
        "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression": add } }],
    });
    let binding = serde_json::json!({ "policyName": NAME });
    [("MutatingAdmissionPolicy", policy), ("MutatingAdmissionPolicyBinding", binding)].map(|(kind, spec)| {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind));
        let object = DynamicObject::new(NAME, &resource).data(serde_json::json!({ "spec": spec }));
        Optional { resource, object }
    })
}

fn refuse_delete(name: &str, resource: &str, allowed_when: &str, message: &str) -> Policy {
    let policy = serde_json::json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": name },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": { "resourceRules": [{
                "apiGroups": [crate::GROUP],
                "apiVersions": ["*"],
                "operations": ["DELETE"],
                "resources": [resource],
            }]},
            "validations": [{
                "expression": allowed_when,
                "messageExpression": message,
                "reason": "Forbidden",
            }],
        },
    });
    let binding = serde_json::json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] },
    });
    Policy {
        policy: serde_json::from_value(policy).expect("the policy above has the API's shape"),
        binding: serde_json::from_value(binding).expect("the binding above has the API's shape"),
    }
}
