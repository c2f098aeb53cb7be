//! Debug of the messages that carry secrets, without these.

use std::fmt;

use crate::v1::{EnrollRequest, EnrollResponse, Hello};

impl fmt::Debug for EnrollRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node_id, secret: _, version, service_account_token: _ } = self;
        f.debug_struct("EnrollRequest").field("node_id", node_id).field("version", version).finish_non_exhaustive()
    }
}

impl fmt::Debug for EnrollResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node_key: _, cluster_id } = self;
        f.debug_struct("EnrollResponse").field("cluster_id", cluster_id).finish_non_exhaustive()
    }
}

impl fmt::Debug for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hello")
            .field("node_id", &self.node_id)
            .field("incarnation", &self.incarnation)
            .field("boot_id", &self.boot_id)
            .field("version", &self.version)
            .field("instances", &self.instances)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_shown() {
        let secret = vec![7; 32];
        let hello = Hello { node_id: "node-a".into(), node_key: secret.clone(), ..Hello::default() };
        let (token, node_id) = ("hush".to_owned(), "node-a".to_owned());
        let request =
            EnrollRequest { node_id, secret: secret.clone(), service_account_token: token, ..Default::default() };
        let response = EnrollResponse { node_key: secret, ..EnrollResponse::default() };
        let shown = format!("{hello:?} {request:?} {response:?}");
        assert!(shown.contains("node-a") && !shown.contains("7, 7") && !shown.contains("hush"), "{shown}");
    }
}
