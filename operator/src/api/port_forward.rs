//! `portforward`: one TCP connection to a port of the guest.

use std::num::NonZeroU16;

use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, open_stream};

use super::{GuestStream, channels::Carries, request::Subresource, status::ApiError};

/// What the query of a portforward request says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortForwardOptions {
    pub port: NonZeroU16,
}

impl GuestStream for PortForwardOptions {
    fn from_query(query: &str) -> Result<Self, ApiError> {
        let ports = form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key == "port" || key == "ports");
        let ports: Vec<_> = ports.map(|(_, value)| value).collect();
        let [port] = &ports[..] else {
            let message = "give one port=NUMBER: each connection is a stream of its own";
            return Err(ApiError::BadRequest(message.to_owned()));
        };
        let parsed = port.parse();
        let port = parsed
            .map_err(|_| ApiError::BadRequest(format!("port must be a whole number from 1 to 65535, not {port:?}")))?;
        Ok(Self { port })
    }

    fn subresource(&self) -> Subresource {
        Subresource::PortForward
    }

    fn kind(&self, instance: InstanceId) -> open_stream::Kind {
        let port = u32::from(self.port.get());
        open_stream::Kind::Connect(v1::ConnectRequest { instance_id: instance.to_string(), port })
    }

    fn carries(&self) -> Carries {
        Carries {
            input: true,
            stdout: true,
            when_leader_changes: "the connection was ended, connect again",
            ..Carries::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_port_is_asked_for() {
        assert_eq!(PortForwardOptions::from_query("port=8080").unwrap().port.get(), 8080);
        for query in ["", "port=0", "port=65536", "port=http", "port=80&port=81", "port="] {
            let error = PortForwardOptions::from_query(query).unwrap_err();
            assert_eq!(error.to_status().code, Some(400), "{query}");
        }
    }
}
