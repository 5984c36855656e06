//! The ledger's tasks: one settles what exchanges could not settle themselves, one renews leases, one
//! looks at the clocks of parked calls.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{self, Instant, MissedTickBehavior},
};

use super::{
    LEASE, Ledger, Waiting,
    claim::Finish,
    entry::Report,
    millis,
    step::{entry_of, put},
};
use crate::store::{self, Name, View, update_with};

/// Ends and reports that wait for the store.
pub(super) const QUEUE: usize = 16 * 1024;
/// Updates under way at once: the store groups them.
const CONCURRENT: usize = 256;
/// An end that the store does not take is tried again after this long ...
const AGAIN: Duration = Duration::from_millis(500);
/// ... for this long.
const GIVE_UP: Duration = Duration::from_secs(600);
/// How often claims are renewed.
const RENEWAL: Duration = Duration::from_secs(5);
/// An attempt whose lease has less than this left and cannot be renewed is closed.
const LAST_MOMENT: Duration = Duration::from_secs(4);
/// How often the clocks of parked calls are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How often the store is asked whether it answers.
const PING: Duration = Duration::from_secs(1);

/// What an exchange left to do.
#[derive(Debug)]
pub(super) enum Settle {
    /// Progress of an attempt that runs on.
    Report {
        /// Under which key.
        name: Name,
        /// Whose.
        owner: String,
        /// What it said.
        report: Report,
    },
    /// An attempt has ended.
    Finish(Finish),
}

/// Settles until the ledger is gone.
pub(super) async fn run(ledger: Weak<Ledger>, mut settles: mpsc::Receiver<Settle>) {
    let mut under_way = JoinSet::new();
    while let Some(settle) = settles.recv().await {
        while under_way.len() >= CONCURRENT {
            under_way.join_next().await;
        }
        while under_way.try_join_next().is_some() {}
        let Some(ledger) = ledger.upgrade() else { break };
        under_way.spawn(async move {
            match settle {
                Settle::Report { name, owner, report } => note(&ledger, name, owner, report).await,
                Settle::Finish(finish) => end(&ledger, &finish).await,
            }
        });
    }
    while under_way.join_next().await.is_some() {}
}

/// Progress is written once; the next report or the end says it again.
async fn note(ledger: &Ledger, name: Name, owner: String, report: Report) {
    let ttl = millis(ledger.settings.load().keys_ttl);
    let written = update_with(&*ledger.store, vec![name], move |view: &View<'_>| {
        let next = entry_of(view).and_then(|entry| entry.reported(&owner, &report));
        (vec![put(next.as_ref(), view.now + ttl)], ())
    })
    .await;
    let _ = ledger.watch(written);
}

/// An end is written until the store takes it.
async fn end(ledger: &Ledger, finish: &Finish) {
    let began = Instant::now();
    let mut failed = false;
    loop {
        match ledger.finish(finish).await {
            Ok(()) => {
                if failed {
                    tracing::info!("the end of a call is stored now");
                }
                break;
            }
            Err(error) if began.elapsed() > GIVE_UP => {
                tracing::error!(%error, reason = "commit_failed", "the end of a call could not be stored");
                break;
            }
            Err(_) => failed = true,
        }
        time::sleep(AGAIN).await;
    }
    ledger.unlease(&finish.owner);
}

/// Lets go of parked calls whose clock has run out: nobody waits for them any more, so their servers are told to stop.
pub(super) async fn let_go(ledger: Weak<Ledger>) {
    let mut tick = time::interval(LOOK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(ledger) = ledger.upgrade() else { return };
        let over = ledger.parked().over(Instant::now());
        over.into_iter().for_each(Waiting::give_up);
    }
}

/// Renews every lease while its attempt runs; closes an attempt whose lease cannot be renewed before it runs out.
pub(super) async fn renew(ledger: Weak<Ledger>) {
    let mut tick = time::interval(RENEWAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(ledger) = ledger.upgrade() else { return };
        ledger.prepare().await;
        let held: Vec<(String, Name)> =
            ledger.leases().iter().map(|(owner, lease)| (owner.clone(), lease.name.clone())).collect();
        let mut renewals = JoinSet::new();
        for (owner, name) in held {
            while renewals.len() >= CONCURRENT {
                renewals.join_next().await;
            }
            renewals.spawn(renew_one(ledger.clone(), owner, name));
        }
        while renewals.join_next().await.is_some() {}
    }
}

/// Asks now and then whether the store answers: so readiness says it when no call does, and the log when it is back.
pub(super) async fn watch(ledger: Weak<Ledger>) {
    let mut tick = time::interval(PING);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let Some(ledger) = ledger.upgrade() else { return };
        // It has been said.
        let _ = ledger.ping().await;
    }
}

pub(super) async fn renew_one(ledger: Arc<Ledger>, owner: String, name: Name) {
    let asked = Instant::now();
    let ttl = millis(ledger.settings.load().keys_ttl);
    let renewed = renewal(&ledger, &owner, name, ttl).await;
    let mut leases = ledger.leases();
    let Some(lease) = leases.get_mut(&owner) else { return };
    let lost = match renewed {
        Ok(true) => {
            lease.until = asked + LEASE;
            false
        }
        // Another attempt has it, or the record is gone.
        Ok(false) => true,
        // No further renewal would come in time.
        Err(_) => lease.until <= Instant::now() + RENEWAL + LAST_MOMENT,
    };
    if lost && let Some(running) = lease.running.take() {
        drop(leases);
        running.lose_lease();
    }
}

async fn renewal(ledger: &Ledger, owner: &str, name: Name, ttl: u64) -> Result<bool, store::Error> {
    let owner = owner.to_owned();
    let renewed = update_with(&*ledger.store, vec![name], move |view: &View<'_>| {
        let next = entry_of(view).and_then(|entry| entry.renewed(&owner, view.now + millis(LEASE)));
        (vec![put(next.as_ref(), view.now + ttl)], next.is_some())
    })
    .await;
    ledger.watch(renewed)
}
