use futures::FutureExt as _;

use super::*;

#[test]
fn a_session_is_looked_at_often_only_while_something_is_awaited() {
    let (session, _queue) = Session::new(NewSession::plain("a".parse().unwrap(), Incarnation(1)));
    let is_soon = || {
        let now = Instant::now();
        session.next_look(now) == now + LOOK_EVERY
    };
    let was_stirred = || session.stirred().now_or_never().is_some();
    session.acknowledge();
    assert!(is_soon(), "its settings are not confirmed");
    assert!(session.confirm_settings(1) && is_soon(), "its clock was never measured");
    assert!(session.probe_clock().is_none());
    for probe in 1..=4 {
        assert!(is_soon(), "a probe is under way");
        let now = u64::try_from(Moment::now().unix_nanos).unwrap();
        let reading =
            v1::ClockReading { probe, received_unix_nanos: now, sent_unix_nanos: now, ..v1::ClockReading::default() };
        session.take_clock(&reading);
    }
    assert!(!is_soon() && !was_stirred());

    let draining = Settings { drain: true, ..Settings::default() };
    assert!(session.push_settings(draining, 2) && was_stirred() && is_soon());
    assert!(session.confirm_settings(2) && !is_soon());
    assert!(session.send(to_node::Message::TearDown(v1::TearDown::default())));
    assert!(was_stirred() && is_soon(), "it owes the node a moment to remember");
}
