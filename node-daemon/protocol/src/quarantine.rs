//! The name of one accident: a node that is ahead of its control plane.

use sha2::{Digest as _, Sha256};

use crate::v1::Hello;

/// Names what a node has seen of a control plane that is no more. Both sides compute it from the same Hello, so that
/// an adoption which an admin ordered for one accident never counts for a later one.
pub fn quarantine_id(hello: &Hello) -> String {
    let latest = hello.latest.clone().unwrap_or_default();
    let mut digest = Sha256::new();
    for text in [&hello.node_id, &hello.cluster_id, &latest.leadership] {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    }
    for number in [hello.highest_revision, hello.highest_term, latest.term, latest.renewed_unix_micros] {
        digest.update(number.to_le_bytes());
    }
    digest.finalize().iter().take(8).fold("q-".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::Moment;

    #[test]
    fn another_accident_has_another_name() {
        let moment = |renewed_unix_micros| Some(Moment { term: 3, leadership: "a".into(), renewed_unix_micros });
        let hello = Hello { node_id: "n".into(), latest: moment(1), ..Hello::default() };
        let restarted = Hello { boot_id: "other".into(), incarnation: Some(3), ..hello.clone() };
        assert_eq!(quarantine_id(&hello), quarantine_id(&restarted), "a restart changes nothing");
        for other in [
            Hello { latest: moment(2), ..hello.clone() },
            Hello { highest_revision: 1, ..hello.clone() },
            Hello { highest_term: 1, ..hello.clone() },
            Hello { cluster_id: "c".into(), ..hello.clone() },
            Hello { node_id: "m".into(), ..hello.clone() },
        ] {
            assert_ne!(quarantine_id(&hello), quarantine_id(&other), "{other:?}");
        }
    }
}
