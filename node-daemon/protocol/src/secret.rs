//! Secrets: 32 random bytes each, compared by their SHA-256, never shown by Debug.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use rand::TryRngCore as _;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

const LENGTH: usize = 32;
const TOKEN_PREFIX: &str = "kibo-enroll-v1";

/// 32 secret bytes. Debug shows nothing of them, and there is no Display.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; LENGTH]);

/// The long-lived secret of a node; the operator stores only its hash.
pub type NodeKey = Secret;

impl Secret {
    /// New random bytes from the operating system.
    pub fn generate() -> Result<Self, TokenError> {
        let mut bytes = [0; LENGTH];
        rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(|_| TokenError::NoRandomness)?;
        Ok(Self(bytes))
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenError> {
        bytes.try_into().map(Self).map_err(|_| TokenError::SecretLength(bytes.len()))
    }

    /// The bytes themselves, for the wire and the key file.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    pub fn hash(&self) -> SecretHash {
        SecretHash(Sha256::digest(self.0).into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}

/// SHA-256 of a secret; shown in lower-case hexadecimal.
#[derive(Clone, Copy)]
pub struct SecretHash([u8; 32]);

impl PartialEq for SecretHash {
    /// In constant time, though a hash of 32 random bytes gives nothing away.
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for SecretHash {}

impl fmt::Display for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for SecretHash {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let mut hash = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(TokenError::Hash);
        }
        for (byte, pair) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| TokenError::Hash)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| TokenError::Hash)?;
        }
        Ok(Self(hash))
    }
}

/// What is wrong with a secret that came from outside.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TokenError {
    #[error("the operating system gave no random bytes")]
    NoRandomness,
    #[error("a secret must have 32 bytes, not {0}")]
    SecretLength(usize),
    #[error("a hash must be 64 hexadecimal digits")]
    Hash,
    #[error(
        "the enrollment token is malformed: it must be the whole line that `kibo enrollment issue` printed, which begins with {TOKEN_PREFIX:?}"
    )]
    Malformed,
}

/// What a host shows to become a node: `kibo-enroll-v1.<node>.<secret>.<hash of the operator's CA>`.
///
/// The hash lets the host check at first contact that it speaks with the right operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrollmentToken {
    pub node_id: String,
    pub secret: Secret,
    /// SHA-256 of the operator's CA certificate in DER.
    pub ca_hash: SecretHash,
}

impl EnrollmentToken {
    /// SHA-256 of a certificate in DER, as a token carries it.
    pub fn hash_of_ca(der: &[u8]) -> SecretHash {
        SecretHash(Sha256::digest(der).into())
    }

    /// The one line to hand over. Not a Display, so that it does not get into a log by accident.
    pub fn expose(&self) -> String {
        let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let node = encode(self.node_id.as_bytes());
        format!("{TOKEN_PREFIX}.{node}.{}.{}", encode(&self.secret.0), encode(&self.ca_hash.0))
    }
}

impl FromStr for EnrollmentToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let parts: Vec<_> = text.trim().split('.').collect();
        let [TOKEN_PREFIX, node, secret, ca_hash] = parts[..] else { return Err(TokenError::Malformed) };
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed);
        let node_id = String::from_utf8(decode(node)?).map_err(|_| TokenError::Malformed)?;
        let ca_hash = decode(ca_hash)?.try_into().map_err(|_| TokenError::Malformed)?;
        Ok(Self { node_id, secret: Secret::from_bytes(&decode(secret)?)?, ca_hash: SecretHash(ca_hash) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_the_way_through_its_text() {
        let token = EnrollmentToken {
            node_id: "rack1.node-2".into(),
            secret: Secret::generate().unwrap(),
            ca_hash: EnrollmentToken::hash_of_ca(b"ca"),
        };
        assert_eq!(format!("{}\n", token.expose()).parse(), Ok(token));
    }

    #[test]
    fn what_is_no_token_is_refused() {
        for bad in ["", "kibo-enroll-v1", "kibo-enroll-v1.a.b.c", "kibo-enroll-v2.YQ.YQ.YQ", "x.y.z.w"] {
            assert!(bad.parse::<EnrollmentToken>().is_err(), "{bad}");
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let secret = Secret::from_bytes(&[7; 32]).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(redacted)");
        assert_eq!(secret.hash().to_string().parse(), Ok(secret.hash()));
    }
}
