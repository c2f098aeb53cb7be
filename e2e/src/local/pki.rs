//! The keys and certificates of a local control plane: made once per state directory, all of them
//! P-256, none of them of use anywhere else.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::json;

/// A development cluster is rarely kept for longer, and a forgotten key should not work for ever.
const VALID: Duration = Duration::from_secs(5 * 365 * 24 * 3600);

/// Certificates are valid a little earlier than they were made, for clocks that step back.
const BACKDATED: Duration = Duration::from_secs(3600);

#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("failed to make the certificate of {name}")]
    Certificate {
        name: &'static str,
        #[source]
        source: rcgen::Error,
    },
    #[error("failed to write {}: check that the state directory is writable", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("failed to read {}: run down --delete and up again", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// Files of the PKI, by what they are for. A pair is `<name>.crt` and `<name>.key`.
#[derive(Clone, Debug)]
pub struct Pki {
    dir: PathBuf,
}

/// What a leaf certificate is used for.
#[derive(Clone, Copy)]
enum Usage {
    Server,
    Client,
    Both,
}

impl Pki {
    /// Opens the PKI in `dir`, making whatever part of it is not complete. A state directory whose
    /// `up` was interrupted here is made anew from the start: nothing has used a half PKI.
    pub fn ensure(dir: PathBuf) -> Result<Self, PkiError> {
        let pki = Self { dir };
        let complete = pki.dir.join("complete");
        if complete.exists() {
            return Ok(pki);
        }
        fs::create_dir_all(&pki.dir).map_err(|source| PkiError::Write { path: pki.dir.clone(), source })?;
        pki.make()?;
        write(&complete, b"")?;
        Ok(pki)
    }

    fn make(&self) -> Result<(), PkiError> {
        let cluster = self.authority("ca", "kibotos-local")?;
        // etcd trusts an authority of its own: a client certificate of the cluster opens no etcd.
        let etcd = self.authority("etcd-ca", "kibotos-local-etcd")?;
        // The front proxy must not share the client CA, or every client could claim to be anybody.
        let proxy = self.authority("front-proxy-ca", "kibotos-local-front-proxy")?;

        let loopback = ["localhost", "127.0.0.1"];
        let apiserver = [
            "localhost",
            "127.0.0.1",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ];
        self.leaf("apiserver", &cluster, "kube-apiserver", None, Usage::Server, &apiserver)?;
        self.leaf("controller-manager-server", &cluster, "kube-controller-manager", None, Usage::Server, &loopback)?;
        self.leaf("etcd", &etcd, "etcd", None, Usage::Both, &loopback)?;
        self.leaf("etcd-client", &etcd, "kube-apiserver", None, Usage::Client, &[])?;
        self.leaf("front-proxy-client", &proxy, FRONT_PROXY_NAME, None, Usage::Client, &[])?;
        self.leaf("admin", &cluster, "local-admin", Some("system:masters"), Usage::Client, &[])?;
        self.leaf("controller-manager", &cluster, "system:kube-controller-manager", None, Usage::Client, &[])?;
        let tokens = key("sa")?;
        write(&self.path("sa.key"), tokens.serialize_pem().as_bytes())?;
        write(&self.path("sa.pub"), tokens.public_key_pem().as_bytes())
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    pub fn read(&self, file: &str) -> Result<Vec<u8>, PkiError> {
        let path = self.path(file);
        fs::read(&path).map_err(|source| PkiError::Read { path, source })
    }

    /// A kubeconfig for the client certificate `pair`, complete in itself.
    pub fn kubeconfig(&self, pair: &str, server: &str) -> Result<String, PkiError> {
        Ok(kubeconfig(server, &self.read("ca.crt")?, pair, &self.credentials(pair)?))
    }

    /// The user of a kubeconfig that presents the client certificate `pair`.
    pub(super) fn credentials(&self, pair: &str) -> Result<serde_json::Value, PkiError> {
        Ok(json!({
            "client-certificate-data": base64(&self.read(&format!("{pair}.crt"))?),
            "client-key-data": base64(&self.read(&format!("{pair}.key"))?),
        }))
    }

    /// A kubeconfig for a ServiceAccount's token.
    pub fn token_kubeconfig(&self, user: &str, token: &str, server: &str) -> Result<String, PkiError> {
        Ok(kubeconfig(server, &self.read("ca.crt")?, user, &json!({ "token": token })))
    }

    fn authority(&self, name: &'static str, common_name: &str) -> Result<Issuer<'static, KeyPair>, PkiError> {
        let failed = |source| PkiError::Certificate { name, source };
        let key = key(name)?;
        let mut params = params(common_name, None, &[]).map_err(failed)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(failed)?;
        write(&self.path(&format!("{name}.crt")), certificate.pem().as_bytes())?;
        Ok(Issuer::new(params, key))
    }

    fn leaf(
        &self,
        name: &'static str,
        authority: &Issuer<'static, KeyPair>,
        common_name: &str,
        organization: Option<&str>,
        usage: Usage,
        names: &[&str],
    ) -> Result<(), PkiError> {
        let failed = |source| PkiError::Certificate { name, source };
        let key = key(name)?;
        let mut params = params(common_name, organization, names).map_err(failed)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        params.extended_key_usages = match usage {
            Usage::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
            Usage::Client => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Usage::Both => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
        };
        let certificate = params.signed_by(&key, authority).map_err(failed)?;
        write(&self.path(&format!("{name}.crt")), certificate.pem().as_bytes())?;
        write(&self.path(&format!("{name}.key")), key.serialize_pem().as_bytes())
    }
}

/// The name by which an aggregated API server knows the API server that forwards to it.
pub const FRONT_PROXY_NAME: &str = "front-proxy-client";

fn params(common_name: &str, organization: Option<&str>, names: &[&str]) -> Result<CertificateParams, rcgen::Error> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names)?;
    let mut subject = DistinguishedName::new();
    if let Some(organization) = organization {
        subject.push(DnType::OrganizationName, organization);
    }
    subject.push(DnType::CommonName, common_name);
    params.distinguished_name = subject;
    let now = SystemTime::now();
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + VALID).into();
    Ok(params)
}

fn key(name: &'static str) -> Result<KeyPair, PkiError> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(|source| PkiError::Certificate { name, source })
}

/// A kubeconfig with one cluster and one user.
pub(super) fn kubeconfig(server: &str, ca: &[u8], user: &str, credentials: &serde_json::Value) -> String {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "local",
            "cluster": { "server": server, "certificate-authority-data": base64(ca) },
        }],
        "users": [{ "name": user, "user": credentials }],
        "contexts": [{ "name": "local", "context": { "cluster": "local", "user": user } }],
        "current-context": "local",
    });
    // Every JSON document is YAML; the pretty form is what a person may want to read.
    format!("{config:#}\n")
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// Writes a file that only its owner reads, replacing an earlier one in one step.
pub fn write(path: &Path, content: &[u8]) -> Result<(), PkiError> {
    let attempt = || {
        let fresh = path.with_extension("new");
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        file.write_all(content)?;
        fs::rename(&fresh, path)
    };
    attempt().map_err(|source| PkiError::Write { path: path.to_owned(), source })
}
