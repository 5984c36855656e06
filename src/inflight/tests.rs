use std::task::Waker;

use super::*;

fn scope(session: &str) -> Scope {
    Scope { upstream: "one".into(), principal: None, session: Some(session.as_bytes().into()), host: None }
}

fn id(token: &str) -> Id {
    Id::parse(token.as_bytes()).unwrap()
}

fn enter(registry: &Arc<Registry>, token: &str) -> Entry {
    registry.enter(scope("a"), Some(id(token)), Sort::Request, Era::Legacy)
}

#[test]
fn a_request_is_found_by_its_scope_and_its_id_with_the_ids_type() {
    let registry = Arc::default();
    let entry = enter(&registry, "1");
    assert!(registry.find(&scope("a"), &id("\"1\"")).is_none());
    assert!(registry.find(&scope("b"), &id("1")).is_none());
    let found = registry.find(&scope("a"), &id("1")).unwrap();
    assert!(Arc::ptr_eq(&found, &entry.running));
    drop(entry);
    assert!(registry.find(&scope("a"), &id("1")).is_none());
    assert!(registry.is_empty());
}

#[test]
fn an_id_in_flight_twice_finds_nothing_until_one_has_ended() {
    let registry = Arc::default();
    let first = enter(&registry, "7");
    let second = enter(&registry, "7");
    assert!(registry.find(&scope("a"), &id("7")).is_none());
    drop(first);
    assert!(Arc::ptr_eq(&registry.find(&scope("a"), &id("7")).unwrap(), &second.running));
}

#[test]
fn a_cancel_wins_once_and_never_after_the_answer() {
    let registry = Arc::default();
    let entry = enter(&registry, "1");
    assert!(entry.running.cancel(CancelledBy::Notification));
    assert!(!entry.running.cancel(CancelledBy::Admin));
    assert_eq!(entry.running.cancelled().unwrap().0, CancelledBy::Notification);
    assert!(entry.running.is_won() && !entry.running.is_closed());

    let answered = enter(&registry, "2");
    answered.running.answered();
    assert!(!answered.running.cancel(CancelledBy::Notification));
    assert!(!answered.running.is_won());
}

#[test]
fn closing_wakes_who_waits() {
    let registry = Arc::default();
    let entry = enter(&registry, "1");
    let mut cx = Context::from_waker(Waker::noop());
    assert!(entry.running.poll_closed(&mut cx).is_pending());
    entry.running.close();
    assert!(entry.running.poll_closed(&mut cx).is_ready());
}

#[test]
fn the_nodes_answer_ends_the_wait_of_the_exchange_that_asked() {
    let registry = Arc::default();
    let entry = enter(&registry, "1");
    entry.server_asks(id("90"));
    assert!(entry.running.awaits_node());
    // A response with the id of the node's own request answers nothing.
    registry.node_answers(&scope("a"), &id("1"));
    registry.node_answers(&scope("b"), &id("90"));
    assert!(entry.running.awaits_node());
    registry.node_answers(&scope("a"), &id("90"));
    assert!(!entry.running.awaits_node());
}

#[test]
fn questions_that_a_server_leaves_open_are_bounded_and_forgotten_with_their_exchange() {
    let registry: Arc<Registry> = Arc::default();
    let entry = enter(&registry, "1");
    for number in 0..2 * SERVER_REQUESTS {
        entry.server_asks(id(&number.to_string()));
    }
    assert_eq!(lock(&registry.table).asked.len(), SERVER_REQUESTS);
    let other = enter(&registry, "2");
    other.server_asks(Id::string(&"x".repeat(LONGEST_ASKED)));
    assert!(!other.running.awaits_node(), "one so long is not remembered");
    drop(other);
    drop(entry);
    assert!(lock(&registry.table).asked.is_empty());
    assert!(lock(&registry.table).ids.is_empty());
}

#[tokio::test]
async fn a_drain_waits_until_nothing_runs() {
    let registry: Arc<Registry> = Arc::default();
    registry.empty().await;
    let entry = enter(&registry, "1");
    let waits = tokio::spawn({
        let registry = registry.clone();
        async move { registry.empty().await }
    });
    tokio::task::yield_now().await;
    assert!(!waits.is_finished());
    drop(entry);
    waits.await.unwrap();
}
