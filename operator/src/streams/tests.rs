use std::{sync::Arc, time::Duration};

use futures::{FutureExt as _, stream};
use kibo_protocol::v1::stream_from_node::Frame;

use super::*;
use crate::session::live::{NewSession, Session};

const INCARNATION: Incarnation = Incarnation(2);

/// A registry with one live session, and what its node is sent.
struct Shop {
    streams: StreamRegistry,
    to_node: mpsc::Receiver<v1::ToNode>,
}

fn node() -> NodeId {
    "node-1".parse().unwrap()
}

fn shop() -> Shop {
    let (session, to_node) = Session::new(NewSession::plain(node(), INCARNATION));
    let sessions = Registry::default();
    sessions.insert(Arc::new(session));
    Shop { streams: StreamRegistry::new(sessions), to_node }
}

impl Shop {
    /// Starts to open a stream and returns its id as the node hears it.
    async fn ask(&mut self) -> (tokio::task::JoinHandle<Result<NodeStream, OpenError>>, String) {
        let streams = self.streams.clone();
        let opening = tokio::spawn(async move {
            streams.open(&node(), INCARNATION, open_stream::Kind::Exec(v1::ExecRequest::default())).await
        });
        let Some(to_node::Message::OpenStream(open)) = self.next().await else { panic!("no OpenStream") };
        (opening, open.stream_id)
    }

    async fn next(&mut self) -> Option<to_node::Message> {
        self.to_node.recv().await?.message
    }

    fn dial(
        &self,
        node: &NodeId,
        id: &str,
        frames: BoxStream<'static, Result<v1::StreamFromNode, tonic::Status>>,
    ) -> Result<BoxStream<'static, Result<v1::StreamToNode, tonic::Status>>, tonic::Status> {
        let hello = v1::AttachHello { node_id: node.to_string(), stream_id: id.to_owned() };
        self.streams.dialled(&hello, frames)
    }

    async fn expect_close(&mut self, id: &str) {
        match self.next().await {
            Some(to_node::Message::CloseStream(close)) => assert_eq!(close.stream_id, id),
            other => panic!("no CloseStream but {other:?}"),
        }
    }

    fn assert_nothing_waits(&self) {
        assert!(self.streams.waiting().is_empty());
    }
}

fn frames(frames: impl IntoIterator<Item = Frame>) -> BoxStream<'static, Result<v1::StreamFromNode, tonic::Status>> {
    let frames: Vec<_> = frames.into_iter().map(|frame| Ok(v1::StreamFromNode { frame: Some(frame) })).collect();
    stream::iter(frames).boxed()
}

#[tokio::test]
async fn a_stream_that_the_node_dials_carries_both_directions() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    let exit = v1::ExitStatus { code: Some(7), signal: None };
    let said = [Frame::Stdout(vec![0, 255].into()), Frame::StdoutClosed(true), Frame::Exit(exit)];
    let mut to_node = shop.dial(&node(), &id, frames(said)).unwrap();
    let NodeStream { mut output, input } = opening.await.unwrap().unwrap();
    assert_eq!(output.next().await.unwrap(), Some(OutputFrame::Stdout(vec![0, 255].into())));
    assert_eq!(output.next().await.unwrap(), Some(OutputFrame::StdoutClosed));
    assert_eq!(output.next().await.unwrap(), Some(OutputFrame::Exit(exit)));

    let large = vec![7; 600 * 1024];
    let (written, received) = tokio::join!(
        async {
            assert!(input.resize(132, 43).await && input.signal(2).await);
            assert!(input.write(large.clone().into()).await && input.close().await);
            drop(input);
        },
        async {
            let mut received = Vec::new();
            while let Some(Ok(message)) = to_node.next().await {
                match message.frame.unwrap() {
                    v1::stream_to_node::Frame::Stdin(data) => {
                        assert!(data.len() <= 256 * 1024);
                        received.extend_from_slice(&data);
                    }
                    v1::stream_to_node::Frame::StdinClosed(closed) => assert!(closed),
                    v1::stream_to_node::Frame::Resize(size) => assert_eq!((size.columns, size.rows), (132, 43)),
                    v1::stream_to_node::Frame::Signal(signal) => assert_eq!(signal, 2),
                }
            }
            received
        }
    );
    let () = written;
    assert_eq!(received, large);

    drop(output);
    assert_eq!(shop.next().now_or_never(), None, "a stream that has ended is not closed once more");
    shop.assert_nothing_waits();
}

#[tokio::test]
async fn a_client_that_goes_away_closes_the_stream_at_the_node() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    let _to_node = shop.dial(&node(), &id, stream::pending().boxed()).unwrap();
    drop(opening.await.unwrap().unwrap());
    shop.expect_close(&id).await;
}

#[tokio::test]
async fn who_gives_up_waiting_leaves_nothing_behind() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    opening.abort();
    shop.expect_close(&id).await;
    shop.assert_nothing_waits();
    assert!(shop.dial(&node(), &id, frames([])).is_err(), "it came too late");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_does_not_dial_is_not_waited_for_long() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    tokio::time::advance(Duration::from_secs(6)).await;
    assert!(matches!(opening.await.unwrap(), Err(OpenError::Timeout(_))));
    shop.expect_close(&id).await;
    shop.assert_nothing_waits();
}

#[tokio::test]
async fn a_refusal_is_passed_on_in_the_nodes_words() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    let refused = |message: &str| v1::StreamRefused {
        stream_id: id.clone(),
        message: message.to_owned(),
        failure: v1::StreamFailure::NoInstance.into(),
    };
    shop.streams.refused(&"node-2".parse().unwrap(), refused("not the node that was asked"));
    shop.streams.refused(&node(), refused("it has just ended"));
    match opening.await.unwrap() {
        Err(OpenError::Refused { failure, message, .. }) => {
            assert_eq!((failure, message.as_str()), (v1::StreamFailure::NoInstance, "it has just ended"));
        }
        other => panic!("{:?}", other.err()),
    }
    assert_eq!(shop.next().now_or_never(), None, "what was refused is not closed");
    shop.assert_nothing_waits();
}

#[tokio::test]
async fn the_id_of_a_stream_is_worth_nothing_to_another_node() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    assert!(shop.dial(&"node-2".parse().unwrap(), &id, frames([])).is_err());
    assert!(shop.dial(&node(), "another id", frames([])).is_err());
    assert!(shop.dial(&node(), &id, frames([])).is_ok());
    assert!(shop.dial(&node(), &id, frames([])).is_err(), "an id works once");
    assert!(opening.await.unwrap().is_ok());
}

#[tokio::test]
async fn the_end_of_the_session_ends_the_wait() {
    let mut shop = shop();
    let (opening, _) = shop.ask().await;
    shop.streams.session_ended(&node());
    assert!(matches!(opening.await.unwrap(), Err(OpenError::SessionLost(_))));
    shop.assert_nothing_waits();
}

#[tokio::test]
async fn without_a_session_in_that_incarnation_nothing_is_asked() {
    let shop = shop();
    let kind = open_stream::Kind::Log(v1::LogRequest::default());
    let opened = shop.streams.open(&node(), Incarnation(1), kind).await;
    assert!(matches!(opened, Err(OpenError::NoSession(_))));
    shop.assert_nothing_waits();
}

#[tokio::test]
async fn a_stream_that_breaks_is_not_taken_for_its_end() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    let broken = stream::iter([Err(tonic::Status::unavailable("connection reset"))]).boxed();
    let _to_node = shop.dial(&node(), &id, broken).unwrap();
    let error = opening.await.unwrap().unwrap().output.next().await.unwrap_err().to_string();
    assert!(error.contains("node-1") && error.contains("connection reset"), "{error}");
}

#[tokio::test]
async fn nothing_is_read_ahead_of_the_client() {
    let mut shop = shop();
    let (opening, id) = shop.ask().await;
    let read = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = read.clone();
    let endless = stream::repeat_with(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(v1::StreamFromNode { frame: Some(Frame::Stdout(vec![1].into())) })
    });
    let _to_node = shop.dial(&node(), &id, endless.boxed()).unwrap();
    let mut stream = opening.await.unwrap().unwrap();
    stream.output.next().await.unwrap();
    stream.output.next().await.unwrap();
    assert_eq!(read.load(std::sync::atomic::Ordering::Relaxed), 2);
}
