use super::*;

const LEASE: u64 = 20_000;

fn attempt(owner: &str) -> Attempt {
    Attempt {
        function: "charge".into(),
        digest: "d".into(),
        owner: owner.into(),
        principal: "p".into(),
        era: Era::Modern,
        class: RetryClass::Conditional,
        read_only: false,
        listed: true,
        changed: false,
        number: None,
        leg: false,
        task: false,
        lease: LEASE,
    }
}

fn of(class: RetryClass, owner: &str) -> Attempt {
    Attempt { class, ..attempt(owner) }
}

/// The entry after one attempt that ended so.
fn ended(state: State) -> Entry {
    let (_, entry) = claim(None, &attempt("a"), 0, true, false);
    entry.unwrap().finished("a", state, &Report::default()).unwrap()
}

fn verdict(entry: &Entry, attempt: &Attempt, held: bool) -> Verdict {
    claim(Some(entry), attempt, 1, true, held).0
}

#[test]
fn a_new_key_runs_and_counts_one() {
    let (verdict, entry) = claim(None, &attempt("a"), 5, true, false);
    assert_eq!(verdict, Verdict::Run(Go { attempt: 1, ..Go::default() }));
    let entry = entry.unwrap();
    assert_eq!((entry.state, entry.attempts, entry.lease), (State::Running, 1, 5 + LEASE));
}

#[test]
fn at_capacity_a_new_key_is_busy_and_a_known_one_is_not() {
    assert_eq!(claim(None, &attempt("a"), 0, false, false), (Verdict::Full, None));
    let entry = ended(State::Failed);
    assert!(matches!(claim(Some(&entry), &attempt("b"), 1, false, false).0, Verdict::Run(_)));
}

#[test]
fn a_call_that_is_done_stays_done_however_it_goes_when_it_is_sent_again() {
    let done = ended(State::Done);
    for end in [State::Unknown, State::Failed, State::Busy, State::NotSent, State::Waiting] {
        let (_, running) = claim(Some(&done), &attempt("b"), 1, true, false);
        let running = running.unwrap();
        assert_eq!(running.state_at(2), State::Running);
        assert_eq!(running.state_at(1 + LEASE), State::Done, "its sidecar died");
        let ended = running.finished("b", end, &Report::default()).unwrap();
        assert_eq!((ended.state, ended.committed), (State::Done, false));
        assert_eq!(verdict(&ended, &of(RetryClass::Unsafe, "c"), false), Verdict::AlreadyDone);
    }
}

#[test]
fn a_changed_tools_waiting_call_goes_on_with_its_leg_and_with_nothing_else() {
    let changed = Attempt { changed: true, ..attempt("b") };
    let leg = Attempt { leg: true, ..changed.clone() };
    let waiting = ended(State::Waiting);
    assert_eq!(verdict(&waiting, &changed, false), Verdict::Changed);
    assert!(matches!(verdict(&waiting, &leg, false), Verdict::Run(Go { attempt: 1, .. })));
    let second = Attempt { number: Some(2), ..leg.clone() };
    assert_eq!(verdict(&waiting, &second, false), Verdict::Changed);
    for state in [State::Done, State::Unknown, State::Failed] {
        assert_eq!(verdict(&ended(state), &leg, true), Verdict::Changed);
    }
}

#[test]
fn another_function_or_digest_is_a_mismatch_whatever_the_state() {
    for state in [State::Done, State::Failed, State::Unknown, State::Waiting] {
        let entry = ended(state);
        let function = Attempt { function: "refund".into(), ..attempt("b") };
        let digest = Attempt { digest: "e".into(), ..attempt("b") };
        assert_eq!(verdict(&entry, &function, true), Verdict::Mismatch);
        assert_eq!(verdict(&entry, &digest, true), Verdict::Mismatch);
    }
}

#[test]
fn attempts_never_overlap_until_the_lease_has_run_out() {
    let (_, entry) = claim(None, &attempt("a"), 0, true, false);
    let entry = entry.unwrap();
    assert_eq!(claim(Some(&entry), &attempt("b"), LEASE - 1, true, false).0, Verdict::Busy);
    let (verdict, next) = claim(Some(&entry), &attempt("b"), LEASE, true, false);
    assert!(matches!(verdict, Verdict::Run(Go { attempt: 2, known: true, .. })));
    // The one that lost it has no say any more.
    let next = next.unwrap();
    assert!(next.finished("a", State::Done, &Report::default()).is_none());
    assert!(next.renewed("a", 99).is_none());
    assert!(next.reported("a", &Report::default()).is_none());
}

#[test]
fn a_lease_that_ran_out_with_nobody_after_it_can_still_be_finished() {
    let (_, entry) = claim(None, &attempt("a"), 0, true, false);
    let entry = entry.unwrap();
    assert_eq!(entry.state_at(LEASE), State::Unknown);
    assert_eq!(entry.finished("a", State::Done, &Report::default()).unwrap().state, State::Done);
}

#[test]
fn an_unsafe_call_with_an_unsure_end_is_refused_and_every_other_end_may_go_on() {
    for state in [State::Unknown, State::BusyUnavailable] {
        assert_eq!(verdict(&ended(state), &of(RetryClass::Unsafe, "b"), false), Verdict::OutcomeUnknown);
        for class in [RetryClass::Safe, RetryClass::Conditional] {
            assert!(matches!(verdict(&ended(state), &of(class, "b"), false), Verdict::Run(_)));
        }
        let never_listed = Attempt { listed: false, ..of(RetryClass::Unsafe, "b") };
        assert!(matches!(verdict(&ended(state), &never_listed, false), Verdict::Run(_)));
    }
    for state in [State::Busy, State::NotSent, State::Waiting, State::Failed] {
        assert!(matches!(verdict(&ended(state), &of(RetryClass::Unsafe, "b"), false), Verdict::Run(_)));
    }
}

#[test]
fn an_unsafe_call_whose_lease_ran_out_is_refused() {
    let (_, entry) = claim(None, &of(RetryClass::Unsafe, "a"), 0, true, false);
    let after = claim(entry.as_ref(), &of(RetryClass::Unsafe, "b"), LEASE, true, false);
    assert_eq!(after, (Verdict::OutcomeUnknown, None));
}

#[test]
fn what_is_done_is_replayed_while_its_result_is_held() {
    let done = ended(State::Done);
    for class in [RetryClass::Conditional, RetryClass::Unsafe] {
        assert_eq!(verdict(&done, &of(class, "b"), true), Verdict::Replay);
    }
    assert!(matches!(verdict(&done, &of(RetryClass::Conditional, "b"), false), Verdict::Run(_)));
    assert_eq!(verdict(&done, &of(RetryClass::Unsafe, "b"), false), Verdict::AlreadyDone);
    let reads = Attempt { read_only: true, ..of(RetryClass::Safe, "b") };
    assert!(matches!(verdict(&done, &reads, true), Verdict::Run(_)));
}

#[test]
fn a_leg_is_no_new_attempt_and_is_replayed_after_the_end() {
    let leg = Attempt { leg: true, ..attempt("b") };
    let Verdict::Run(go) = verdict(&ended(State::Waiting), &leg, false) else { panic!("it runs") };
    assert_eq!(go.attempt, 1);
    assert_eq!(verdict(&ended(State::Done), &leg, true), Verdict::Replay);
}

#[test]
fn the_nodes_own_count_of_attempts_stands() {
    let third = Attempt { number: Some(3), ..attempt("b") };
    let (Verdict::Run(go), Some(entry)) = claim(Some(&ended(State::Failed)), &third, 1, true, false) else {
        panic!("it runs")
    };
    assert_eq!((go.attempt, entry.attempts), (3, 3));
    let lost = claim(None, &third, 1, true, false).0;
    assert_eq!(lost, Verdict::Run(Go { attempt: 3, ..Go::default() }));
}

fn reached(progress: f64, total: f64) -> Reached {
    Reached { progress, total: Some(total) }
}

/// What the next attempt goes with after one that reported so.
fn next(report: &Report, again: &Attempt) -> Go {
    let (_, entry) = claim(None, &attempt("a"), 0, true, false);
    let entry = entry.unwrap().finished("a", State::Unknown, report).unwrap();
    match claim(Some(&entry), again, 1, true, false).0 {
        Verdict::Run(go) => go,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_next_attempt_goes_on_from_the_last_token() {
    let mut report = Report::default();
    report.take(reached(1.0, 4.0), Some("t1"), "p");
    report.take(reached(2.0, 4.0), Some("t2"), "p");
    report.take(reached(3.0, 4.0), None, "p");
    let go = next(&report, &attempt("b"));
    assert_eq!(go.resume.as_ref().unwrap().token, "t2");
    assert_eq!(resume_text(&go, true, true), "resumed from progress 2 of 4");
    let nothing = Resume { at: Reached { progress: -0.0, total: None }, ..go.resume.clone().unwrap() };
    let go = Go { resume: Some(nothing), ..go };
    assert_eq!(resume_text(&go, true, true), "resumed from progress 0");
}

#[test]
fn without_a_total_the_text_names_none() {
    let mut report = Report::default();
    report.take(Reached { progress: 2.5, total: None }, Some("t"), "p");
    assert_eq!(resume_text(&next(&report, &attempt("b")), true, true), "resumed from progress 2.5");
}

#[test]
fn an_invalid_token_after_a_good_one_changes_nothing() {
    let mut report = Report::default();
    report.take(reached(1.0, 4.0), Some("good"), "p");
    report.take(reached(2.0, 4.0), Some("not good"), "p");
    let go = next(&report, &attempt("b"));
    assert_eq!(resume_text(&go, true, true), "resumed from progress 1 of 4");
}

#[test]
fn the_reasons_to_start_over_come_in_their_order() {
    let over = |go: &Go, again, part| resume_text(go, again, part);
    let mut invalid = Report::default();
    invalid.take(reached(1.0, 4.0), Some("no token!"), "p");
    let mut silent = Report::default();
    silent.take(reached(1.0, 4.0), None, "p");
    assert_eq!(over(&Go::default(), false, false), "started over: the call may not be made again");
    assert_eq!(over(&Go::default(), true, false), "started over: the server does not take part");
    assert_eq!(over(&Go::default(), true, true), "started over: state lost");
    assert_eq!(
        over(&next(&Report::default(), &attempt("b")), true, true),
        "started over: no progress reported"
    );
    assert_eq!(over(&next(&invalid, &attempt("b")), true, true), "started over: invalid token");
    assert_eq!(over(&next(&silent, &attempt("b")), true, true), "started over: no token");
}

#[test]
fn a_token_is_read_only_by_the_principal_it_came_to() {
    let mut report = Report::default();
    report.take(reached(1.0, 4.0), Some("t"), "p");
    let other = Attempt { principal: "q".into(), ..attempt("b") };
    assert_eq!(next(&report, &other).resume, None);
}

#[test]
fn an_attempt_without_progress_passes_on_what_it_was_given() {
    let mut report = Report::default();
    report.take(reached(1.0, 4.0), Some("t"), "p");
    let (_, entry) = claim(None, &attempt("a"), 0, true, false);
    let entry = entry.unwrap().finished("a", State::Unknown, &report).unwrap();
    let (_, entry) = claim(Some(&entry), &attempt("b"), 1, true, false);
    let entry = entry.unwrap().finished("b", State::Failed, &Report::default()).unwrap();
    let Verdict::Run(go) = verdict(&entry, &attempt("c"), false) else { panic!("it runs") };
    assert_eq!(go.resume.unwrap().token, "t");
}

#[test]
fn a_committed_result_ends_the_resuming() {
    let mut report = Report::default();
    report.take(reached(1.0, 4.0), Some("t"), "p");
    let (_, entry) = claim(None, &attempt("a"), 0, true, false);
    let done = entry.unwrap().finished("a", State::Done, &report).unwrap();
    assert_eq!(done.resume, None);
}

#[test]
fn tokens_are_bounded_in_length_and_letters() {
    assert!(is_token("aZ0._:~+/=-"));
    assert!(is_token(&"x".repeat(256)));
    for bad in ["", " ", "a b", "é", "a\n", &"x".repeat(257)] {
        assert!(!is_token(bad), "{bad:?}");
    }
}

#[test]
fn a_changed_tool_gets_a_first_attempt_and_no_other() {
    let changed = Attempt { changed: true, ..attempt("b") };
    assert!(matches!(claim(None, &changed, 0, true, false).0, Verdict::Run(_)));
    assert_eq!(verdict(&ended(State::Failed), &changed, false), Verdict::Changed);
    assert_eq!(verdict(&ended(State::Done), &changed, true), Verdict::Changed);
    let second = Attempt { number: Some(2), ..changed };
    assert_eq!(claim(None, &second, 0, true, false).0, Verdict::Changed);
}
