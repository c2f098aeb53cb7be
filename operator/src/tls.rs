//! The operator's own certificate authority.
//!
//! Its key is a Secret that is made once; whichever replica creates it first wins, and all use that one.
//! Serving certificates are minted in memory at start and never stored.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Secret},
};
use kibo_crds::FIELD_MANAGER;
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// Secret with the authority's certificate and key.
pub const CA_SECRET: &str = "kibotos-operator-ca";
/// ConfigMap with the certificate alone, for nodes and `kibo`.
pub const CA_CONFIG_MAP: &str = "kibotos-ca";
/// Key of the certificate in both.
pub const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const CA_YEARS: i32 = 20;
/// Longer than any process lives; a certificate ends with its process.
const SERVING_YEARS: i32 = 5;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("failed to {what}: {source}")]
    Api { what: String, source: Box<kube::Error> },
    #[error("failed to make {what}: {source}")]
    Make { what: &'static str, source: rcgen::Error },
    #[error(
        "secret {CA_SECRET} has no usable {key}: restore it, or delete the secret and enroll all nodes anew ({reason})"
    )]
    Broken { key: &'static str, reason: String },
}

fn api_error(what: impl Into<String>) -> impl FnOnce(kube::Error) -> TlsError {
    move |source| TlsError::Api { what: what.into(), source: Box::new(source) }
}

fn make_error(what: &'static str) -> impl FnOnce(rcgen::Error) -> TlsError {
    move |source| TlsError::Make { what, source }
}

/// Signs the operator's serving certificates.
pub struct Authority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate chain with its key, for a server.
pub struct Serving {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    pub chain_pem: String,
    pub key_pem: String,
}

impl std::fmt::Debug for Serving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serving").field("chain_pem", &self.chain_pem).finish_non_exhaustive()
    }
}

impl Authority {
    /// The cluster's authority: the stored one, or a new one that is stored now.
    pub async fn ensure(client: &Client, namespace: &str) -> Result<Self, TlsError> {
        let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
        let authority = match read(&secrets).await? {
            Some(secret) => Self::from_secret(&secret)?,
            None => create(&secrets).await?,
        };
        publish(client, namespace, &authority.certificate_pem).await?;
        Ok(authority)
    }

    fn from_secret(secret: &Secret) -> Result<Self, TlsError> {
        let text = |key: &'static str| {
            let broken = |reason: &str| TlsError::Broken { key, reason: reason.to_owned() };
            let value = secret.data.as_ref().and_then(|data| data.get(key)).ok_or_else(|| broken("it is missing"))?;
            String::from_utf8(value.0.clone()).map_err(|_| broken("it is not PEM"))
        };
        Self::from_pem(text(CA_CERTIFICATE)?, &text(CA_KEY)?)
    }

    fn from_pem(certificate_pem: String, key_pem: &str) -> Result<Self, TlsError> {
        let broken = |key| move |error: rcgen::Error| TlsError::Broken { key, reason: error.to_string() };
        let key = KeyPair::from_pem(key_pem).map_err(broken(CA_KEY))?;
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, key).map_err(broken(CA_CERTIFICATE))?;
        Ok(Self { certificate_pem, issuer })
    }

    /// The authority's certificate.
    pub fn ca_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// A new certificate for these DNS names and IP addresses.
    pub fn serving_certificate(&self, names: &[String]) -> Result<Serving, TlsError> {
        let mut params = CertificateParams::new(names).map_err(make_error("a serving certificate"))?;
        params.distinguished_name.push(DnType::CommonName, "kibo-operator");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        valid_for(&mut params, SERVING_YEARS);
        let key = KeyPair::generate().map_err(make_error("a serving key"))?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(make_error("a serving certificate"))?;
        Ok(Serving {
            chain: vec![certificate.der().clone()],
            chain_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
        })
    }
}

/// From yesterday, so that a host whose clock is late takes it.
fn valid_for(params: &mut CertificateParams, years: i32) {
    let today = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date();
    let yesterday = today.yesterday().unwrap_or(today);
    let parts = |date: jiff::civil::Date, years: i32| {
        // The 28th exists in each month of each year.
        let number = |part: i8| u8::try_from(part).unwrap_or(1);
        rcgen::date_time_ymd(i32::from(date.year()) + years, number(date.month()), number(date.day().min(28)))
    };
    params.not_before = parts(yesterday, 0);
    params.not_after = parts(yesterday, years);
}

async fn read(secrets: &Api<Secret>) -> Result<Option<Secret>, TlsError> {
    secrets.get_opt(CA_SECRET).await.map_err(api_error(format!("read secret {CA_SECRET}")))
}

async fn create(secrets: &Api<Secret>) -> Result<Authority, TlsError> {
    let key = KeyPair::generate().map_err(make_error("the key of the certificate authority"))?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "kibotos operator");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid_for(&mut params, CA_YEARS);
    let certificate = params.self_signed(&key).map_err(make_error("the certificate authority"))?;
    let entry = |name: &str, text: String| (name.to_owned(), ByteString(text.into_bytes()));
    let secret = Secret {
        metadata: ObjectMeta { name: Some(CA_SECRET.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([entry(CA_CERTIFICATE, certificate.pem()), entry(CA_KEY, key.serialize_pem())])),
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    };
    match secrets.create(&PostParams::default(), &secret).await {
        Ok(stored) => {
            tracing::info!("made the certificate authority of this cluster (secret {CA_SECRET})");
            Authority::from_secret(&stored)
        }
        // Another replica was faster, or this write got through before.
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let stored = read(secrets).await?.ok_or_else(|| TlsError::Broken {
                key: CA_CERTIFICATE,
                reason: "it was deleted just now".to_owned(),
            })?;
            Authority::from_secret(&stored)
        }
        Err(error) => Err(api_error(format!("create secret {CA_SECRET}"))(error)),
    }
}

/// The public half, for everybody who connects.
async fn publish(client: &Client, namespace: &str, certificate_pem: &str) -> Result<(), TlsError> {
    let config_map = ConfigMap {
        metadata: ObjectMeta { name: Some(CA_CONFIG_MAP.to_owned()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([(CA_CERTIFICATE.to_owned(), certificate_pem.to_owned())])),
        ..ConfigMap::default()
    };
    Api::<ConfigMap>::namespaced(client.clone(), namespace)
        .patch(CA_CONFIG_MAP, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&config_map))
        .await
        .map_err(api_error(format!("apply config map {CA_CONFIG_MAP}")))?;
    Ok(())
}

/// The names that a certificate for a Service must carry, with those that were given.
pub fn service_names(service: &str, namespace: &str, given: &[String]) -> Vec<String> {
    let mut names = given.to_vec();
    names.extend([
        service.to_owned(),
        format!("{service}.{namespace}"),
        format!("{service}.{namespace}.svc"),
        format!("{service}.{namespace}.svc.cluster.local"),
    ]);
    names.sort();
    names.dedup();
    names.retain(|name| name.parse::<IpAddr>().is_ok() || !name.is_empty());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_authority_signs_for_names_and_addresses() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let certificate = params.self_signed(&key).unwrap();
        let authority = Authority::from_pem(certificate.pem(), &key.serialize_pem()).unwrap();
        let serving = authority.serving_certificate(&["localhost".into(), "127.0.0.1".into(), "::1".into()]).unwrap();
        let (_, parsed) = x509_parser::parse_x509_certificate(&serving.chain[0]).unwrap();
        assert_eq!(parsed.subject_alternative_name().unwrap().unwrap().value.general_names.len(), 3);
        assert!(parsed.validity().is_valid());
    }

    #[test]
    fn a_broken_secret_is_named() {
        let error = Authority::from_secret(&Secret::default()).err().unwrap().to_string();
        assert!(error.contains(CA_SECRET) && error.contains(CA_CERTIFICATE), "{error}");
    }
}
