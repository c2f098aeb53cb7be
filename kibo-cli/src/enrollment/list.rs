//! `kibo enrollment list`.

use clap::Args;
use jiff::Timestamp;
use kibo_crds::{Node, node::Enrollment};
use kube::{ResourceExt as _, api::ListParams};
use serde::Serialize;

use crate::{
    client::{Cluster, Listed, Paging, remark_next_page},
    errors::Result,
    node,
    output::{
        OutputArgs, Present, Table, present, remark,
        words::{age, enum_word, instant, or_absent},
    },
};

#[derive(Args, Debug)]
pub struct List {
    #[command(flatten)]
    paging: Paging,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn list(cluster: &Cluster, args: List) -> Result<()> {
    let api = cluster.cluster_wide::<Node>();
    let listed = args.paging.list(&api, ListParams::default(), &node::subject("")).await?;
    if listed.items.is_empty() {
        remark("no enrollments, since there are no nodes");
    }
    let many = Many { listed, now: Cluster::now() };
    present(args.output.form(), &many)?;
    remark_next_page(&many.listed);
    Ok(())
}

/// What became of the newest token of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Token {
    Pending,
    Used,
    Expired,
    /// The registration ended, or was taken back, after it was issued.
    Void,
}

fn token(node: &Node, grant: &Enrollment, now: Timestamp) -> Token {
    let used = node.status.as_ref().and_then(|status| status.used_secret_hash.as_ref());
    if used == Some(&grant.secret_hash) {
        Token::Used
    } else if node.spec.retirement.is_some() || node.spec.revocation.is_some() {
        Token::Void
    } else if grant.expires_at.0 <= now {
        Token::Expired
    } else {
        Token::Pending
    }
}

struct Many {
    listed: Listed<Node>,
    now: Timestamp,
}

/// A node with its enrollment, in JSON.
#[derive(Serialize)]
struct View {
    node_id: String,
    admission: Option<String>,
    /// Absent: none was issued, or it was taken back.
    token: Option<TokenView>,
    registration_version: Option<String>,
    created_at: Option<String>,
}

#[derive(Serialize)]
struct TokenView {
    state: String,
    expires_at: String,
}

impl Many {
    fn one(&self, node: &Node) -> View {
        View {
            node_id: node.name_any(),
            admission: node.status.as_ref().and_then(|status| status.admission.as_ref()).map(enum_word),
            token: node.spec.enrollment.as_ref().map(|grant| TokenView {
                state: enum_word(&token(node, grant, self.now)),
                expires_at: instant(&grant.expires_at),
            }),
            registration_version: node.resource_version(),
            created_at: node.creation_timestamp().as_ref().map(instant),
        }
    }
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        self.listed.view("enrollments", |node| self.one(node))
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(kube::ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["NODE", "ADMISSION", "TOKEN", "EXPIRES", "AGE"]);
        if wide {
            table = table.columns(["REG_VERSION"]);
        }
        for node in &self.listed.items {
            let view = self.one(node);
            let (state, expires) = view.token.map(|token| (token.state, token.expires_at)).unzip();
            let mut row = vec![
                view.node_id,
                or_absent(view.admission),
                or_absent(state),
                or_absent(expires),
                age(node.creation_timestamp().as_ref(), self.now),
            ];
            if wide {
                row.push(or_absent(view.registration_version));
            }
            table.row(row);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_enrollments() {
        let node = |name: &str, grant: &serde_json::Value, status: &serde_json::Value| -> Node {
            serde_json::from_value(serde_json::json!({
                "metadata": { "name": name, "creationTimestamp": "1970-01-01T00:00:00Z" },
                "spec": { "enrollment": grant }, "status": status,
            }))
            .unwrap()
        };
        let grant = |hash: &str, at: &str| serde_json::json!({ "secretHash": hash, "expiresAt": at });
        let items = vec![
            node("a", &grant("1", "1970-01-01T01:00:00Z"), &serde_json::json!({ "admission": "Pending" })),
            node("b", &grant("1", "1970-01-01T00:00:30Z"), &serde_json::json!({ "admission": "Pending" })),
            node(
                "c",
                &grant("1", "1970-01-01T00:00:30Z"),
                &serde_json::json!({ "admission": "Admitted", "usedSecretHash": "1" }),
            ),
            node("d", &serde_json::Value::Null, &serde_json::json!({ "admission": "Revoked" })),
        ];
        let many = Many { listed: Listed { items, next_page_token: None }, now: Timestamp::from_second(90).unwrap() };
        let expected = "\
NODE   ADMISSION   TOKEN     EXPIRES                AGE
a      PENDING     PENDING   1970-01-01T01:00:00Z   90s
b      PENDING     EXPIRED   1970-01-01T00:00:30Z   90s
c      ADMITTED    USED      1970-01-01T00:00:30Z   90s
d      REVOKED     -         -                      90s
";
        assert_eq!(many.text(false), expected);
    }
}
