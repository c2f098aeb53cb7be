//! Who knocks is a stranger until its key was looked at. What strangers may cost is bounded here: how large their first
//! message is, and how many of them are listened to at once.

use std::{
    collections::HashMap,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Status, body::Body};

/// A Hello lists the Instances of one host; some six thousand fit.
pub const LARGEST_HELLO: u32 = 512 << 10;
/// Strangers that are listened to at once; the others wait in line.
const AT_ONCE: usize = 1024;
/// From one address, so that nobody takes all of these places. A fleet behind one address needs few of them at a time.
const OF_ONE_ADDRESS: usize = 128;

/// A message of gRPC is announced by a flag and its length.
const HEAD: usize = 5;

/// A request whose first message ends it when it is announced as larger than a stranger's may be; nothing of it is kept.
pub fn bound_first_message(request: http::Request<Body>) -> http::Request<Body> {
    request.map(|body| Body::new(FirstMessage { body, head: Vec::with_capacity(HEAD) }))
}

struct FirstMessage {
    body: Body,
    /// The beginning of the first message, until its length is known.
    head: Vec<u8>,
}

impl FirstMessage {
    fn look_at(&mut self, data: &[u8]) -> Result<(), Status> {
        if self.head.len() == HEAD {
            return Ok(());
        }
        self.head.extend(data.iter().take(HEAD - self.head.len()));
        let Ok([_, length @ ..]) = <[u8; HEAD]>::try_from(self.head.as_slice()) else { return Ok(()) };
        let length = u32::from_be_bytes(length);
        if length > LARGEST_HELLO {
            let message = format!("the first message has {length} bytes, and at most {LARGEST_HELLO} are taken");
            return Err(Status::resource_exhausted(message));
        }
        Ok(())
    }
}

impl hyper::body::Body for FirstMessage {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(status) = self.look_at(data)
        {
            return Poll::Ready(Some(Err(status)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The places of those who are listened to; cheap to clone.
#[derive(Clone)]
pub struct Strangers {
    all: Arc<Semaphore>,
    by_address: Arc<Mutex<HashMap<IpAddr, Arc<Semaphore>>>>,
}

/// One of them, until its key was looked at.
pub struct Listened {
    _of_address: Option<OwnedSemaphorePermit>,
    _of_all: OwnedSemaphorePermit,
}

impl Default for Strangers {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(AT_ONCE)), by_address: Arc::default() }
    }
}

impl Strangers {
    fn of(&self, address: IpAddr) -> Arc<Semaphore> {
        let mut all = self.by_address.lock().expect("no holder of this lock panics");
        // A permit keeps its semaphore.
        all.retain(|_, places| Arc::strong_count(places) > 1);
        all.entry(address).or_insert_with(|| Arc::new(Semaphore::new(OF_ONE_ADDRESS))).clone()
    }

    /// Waits for a place; those of one address wait for each other first.
    pub async fn listen(&self, address: Option<IpAddr>) -> Option<Listened> {
        // Nothing closes the semaphores.
        let of_address = match address {
            Some(address) => Some(self.of(address).acquire_owned().await.ok()?),
            None => None,
        };
        let of_all = self.all.clone().acquire_owned().await.ok()?;
        Some(Listened { _of_address: of_address, _of_all: of_all })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn the_length_is_looked_at_before_the_message_is_there() {
        let look = |pieces: &[&[u8]]| {
            let mut first = FirstMessage { body: Body::empty(), head: Vec::new() };
            pieces.iter().try_for_each(|piece| first.look_at(piece)).map_err(|status| status.message().to_owned())
        };
        let head = |length: u32| [&[0][..], &length.to_be_bytes()].concat();
        let whole = [head(LARGEST_HELLO), vec![1; 100]].concat();
        assert_eq!(look(&[&whole, &[0xff; 100]]), Ok(()), "what comes later is not the first message");
        let large = head(LARGEST_HELLO + 1);
        let told = look(&[&large[..3], &large[3..]]).unwrap_err();
        assert_eq!(told, "the first message has 524289 bytes, and at most 524288 are taken");
        assert!(look(&[&large[..4]]).is_ok(), "nothing is known yet");
    }

    #[test]
    fn one_address_does_not_take_every_place() {
        let strangers = Strangers::default();
        let listen = |last| strangers.listen(Some(IpAddr::from([10, 0, 0, last]))).now_or_never().flatten();
        let held: Vec<_> = (0..OF_ONE_ADDRESS).map(|_| listen(1).expect("there is a place")).collect();
        assert!(listen(1).is_none());
        assert!(listen(2).is_some(), "another address has places of its own");
        drop(held);
        assert!(listen(1).is_some());
    }
}
