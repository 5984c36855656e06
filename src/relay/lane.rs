//! The slow lane: streams that have ever more to read take turns there, one turn at a time, so that everybody else is
//! served between any two of them.
//!
//! Words: a stream takes *turns*, each of some bytes. Who takes less than `CALM` forgives only ever counts its bytes. Who
//! took more has its turns in the *lane* until that is forgiven, those in which little comes among them: first come, first
//! served, and as many at a time as there are threads. Without it all floods would stand in the runtime's queue at once,
//! and whoever is woken behind all of them. Only a stream that has its turn there takes the lane's lock.
//!
//! Promises: a wait is no longer than a turn of each that came before, and whoever is dropped in the lane passes it on.

use std::{
    collections::VecDeque,
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{task::yield_now, time::Instant};

/// What a turn takes, but for the last piece, which stays whole.
pub(crate) const TURN_BYTES: usize = 16 * 1024;
/// In this time a turn that was taken is forgiven.
const CALM: Duration = Duration::from_millis(100);
/// So many turns are remembered.
const REMEMBERED: usize = 4;
/// Of so many that are called into their turn, the runtime looks once at what else has come to its sockets; it does by
/// itself after many more.
const CALLS_PER_LOOK: u32 = 4;

/// The lane. One is shared by all streams of a sidecar.
#[derive(Debug)]
pub struct Lane {
    /// How many are in their turn at a time.
    wide: usize,
    /// How many streams were called from the line. A turn that is taken without standing there is not counted.
    calls: AtomicU32,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    last: u64,
    /// In the order of their numbers.
    waiting: VecDeque<(u64, Waker)>,
    /// Those whose turn it is: they are woken, and come.
    called: Vec<u64>,
}

/// One stream's place.
#[derive(Debug)]
pub(crate) struct Place {
    lane: Arc<Lane>,
    /// Bytes that were taken and not forgiven yet.
    taken: usize,
    since: Instant,
    /// Its number in the lane.
    number: Option<u64>,
}

impl Lane {
    /// The lane of a runtime of so many threads.
    pub fn new(threads: usize) -> Arc<Self> {
        Arc::new(Self { wide: threads.max(1), calls: AtomicU32::new(0), line: Mutex::default() })
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.lock().waiting.len()
    }

    /// A poisoned lock means that a holder panicked between two whole steps: the line is good.
    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls those whose turn it is now. The lock is not held while they are woken.
    fn call<'a>(&'a self, mut line: MutexGuard<'a, Line>) {
        while line.called.len() < self.wide {
            let Some((number, waker)) = line.waiting.pop_front() else { break };
            line.called.push(number);
            drop(line);
            if self.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(CALLS_PER_LOOK) {
                wake_behind_all(&waker);
            } else {
                waker.wake();
            }
            line = self.lock();
        }
    }
}

/// Wakes behind everything that is ready, and what the sockets have by then: that is where who yields is woken.
fn wake_behind_all(waker: &Waker) {
    // It is woken, and the future was only needed for that.
    let _ = pin!(yield_now()).poll(&mut Context::from_waker(waker));
}

impl Place {
    /// A place at the start of a stream.
    pub(crate) fn new(lane: Arc<Lane>) -> Self {
        Self { lane, taken: 0, since: Instant::now(), number: None }
    }

    /// Ready when the stream may take its turn.
    pub(crate) fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.taken < TURN_BYTES {
            return Poll::Ready(());
        }
        if self.number.is_none() {
            self.forgive();
            if self.taken < TURN_BYTES {
                return Poll::Ready(());
            }
        }
        let mut line = self.lane.lock();
        let Some(number) = self.number else {
            line.last += 1;
            let number = line.last;
            self.number = Some(number);
            if line.waiting.is_empty() && line.called.len() < self.lane.wide {
                line.called.push(number);
                return Poll::Ready(());
            }
            line.waiting.push_back((number, cx.waker().clone()));
            return Poll::Pending;
        };
        if line.called.contains(&number) {
            drop(line);
            // Waiting is no calm.
            self.since = Instant::now();
            return Poll::Ready(());
        }
        if let Ok(at) = line.waiting.binary_search_by_key(&number, |(number, _)| *number)
            && let Some((_, waker)) = line.waiting.get_mut(at)
        {
            waker.clone_from(cx.waker());
        }
        Poll::Pending
    }

    /// The stream took so many bytes in its turn, and has no more to take now.
    pub(crate) fn took_all(&mut self, bytes: usize) {
        self.count(bytes);
        self.leave();
    }

    /// The stream took so many bytes in its turn, and is woken to take more.
    pub(crate) fn took_some(&mut self, bytes: usize, cx: &mut Context<'_>) {
        self.count(bytes);
        if self.taken < TURN_BYTES {
            cx.waker().wake_by_ref();
        } else {
            let mut line = self.lane.lock();
            line.last += 1;
            let number = line.last;
            let before = self.number.replace(number);
            line.called.retain(|called| Some(*called) != before);
            line.waiting.push_back((number, cx.waker().clone()));
            self.lane.call(line);
        }
    }

    /// The stream takes no turn now.
    pub(crate) fn leave(&mut self) {
        let Some(number) = self.number.take() else { return };
        let mut line = self.lane.lock();
        line.called.retain(|called| *called != number);
        if let Ok(at) = line.waiting.binary_search_by_key(&number, |(number, _)| *number) {
            line.waiting.remove(at);
        }
        self.lane.call(line);
    }

    fn count(&mut self, bytes: usize) {
        self.taken = (self.taken + bytes).min(REMEMBERED * TURN_BYTES);
    }

    fn forgive(&mut self) {
        let now = Instant::now();
        let calm = (now - self.since).as_nanos() * TURN_BYTES as u128 / CALM.as_nanos();
        self.taken = self.taken.saturating_sub(usize::try_from(calm).unwrap_or(usize::MAX));
        self.since = now;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, sync::atomic::AtomicUsize};

    use tokio::{task::JoinHandle, time::sleep};

    use super::*;

    /// A stream that always has more, and counts its turns in `all` and in what it gives.
    fn flood(lane: &Arc<Lane>, all: &Arc<AtomicUsize>) -> (JoinHandle<()>, Arc<AtomicUsize>) {
        let (mut place, all, mine) = (Place::new(lane.clone()), all.clone(), Arc::new(AtomicUsize::new(0)));
        let count = mine.clone();
        let flooding = poll_fn(move |cx| {
            if place.poll_turn(cx).is_ready() {
                all.fetch_add(1, Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
                place.took_some(TURN_BYTES, cx);
            }
            Poll::Pending
        });
        (tokio::spawn(flooding), mine)
    }

    fn count(turns: &AtomicUsize) -> usize {
        turns.load(Ordering::Relaxed)
    }

    /// So many floods, of which all have taken their first turn, which nobody has to wait for.
    async fn floods(
        many: usize,
        lane: &Arc<Lane>,
        all: &Arc<AtomicUsize>,
    ) -> Vec<(JoinHandle<()>, Arc<AtomicUsize>)> {
        let floods: Vec<_> = (0..many).map(|_| flood(lane, all)).collect();
        while floods.iter().any(|(_, turns)| count(turns) == 0) {
            yield_now().await;
        }
        floods
    }

    #[tokio::test]
    async fn whoever_is_woken_beside_many_floods_waits_for_one_turn() {
        let (lane, all) = (Lane::new(1), Arc::default());
        let floods = floods(500, &lane, &all).await;
        assert_eq!(lane.waiting() + 1, floods.len());
        let counted = all.clone();
        // A task, since what a runtime is blocked on stands in no queue.
        let neighbour = tokio::spawn(async move {
            let mut most = 0;
            for _ in 0..1000 {
                let (before, mut woken) = (count(&counted), false);
                // Woken as by another task: it stands at the end of the runtime's queue.
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if std::mem::replace(&mut woken, true) { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                most = most.max(count(&counted) - before);
            }
            most
        });
        assert!(neighbour.await.unwrap() <= 1, "whoever is ready is served between two turns");
        while count(&all) < 5000 {
            yield_now().await;
        }
        let turns: Vec<usize> = floods.iter().map(|(_, turns)| count(turns)).collect();
        let (least, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
        assert!(most - least <= 1, "from {least} to {most} turns");
    }

    /// What comes over a socket is seen between the turns of floods, of which none ever waits for anything.
    #[tokio::test]
    async fn sockets_are_looked_at_after_a_few_turns() {
        let (lane, all) = (Lane::new(1), Arc::default());
        let _floods = floods(500, &lane, &all).await;
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let here = tokio::net::UnixStream::from_std(here).unwrap();
        for _ in 0..20 {
            let before = count(&all);
            std::io::Write::write_all(&mut &there, b"x").unwrap();
            let mut piece = [0];
            while here.try_read(&mut piece).is_err() {
                here.readable().await.unwrap();
            }
            let between = count(&all) - before;
            assert!(between <= 3 * CALLS_PER_LOOK as usize, "{between} turns in between");
        }
    }

    #[tokio::test]
    async fn whoever_is_gone_from_the_lane_passes_it_on() {
        let (lane, all) = (Lane::new(1), Arc::default());
        let floods = floods(20, &lane, &all).await;
        // Of whom one has been called.
        for (flooding, _) in &floods[..19] {
            flooding.abort();
        }
        let before = count(&floods[19].1);
        while count(&floods[19].1) < before + 10 {
            yield_now().await;
        }
        assert!(lane.waiting() <= 1);
        floods[19].0.abort();
        yield_now().await;
        assert_eq!((lane.waiting(), lane.lock().called.len()), (0, 0));
    }

    /// One poll of a stream that has nothing more after so many bytes; false if it had to wait.
    async fn takes(place: &mut Place, bytes: usize) -> bool {
        poll_fn(|cx| {
            let ready = place.poll_turn(cx).is_ready();
            if ready {
                place.took_all(bytes);
            }
            Poll::Ready(ready)
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_little_never_waits_and_who_was_calm_waits_no_more() {
        let lane = Lane::new(1);
        // It is called, and never comes.
        let mut flood = Place::new(lane.clone());
        poll_fn(|cx| {
            flood.took_some(TURN_BYTES, cx);
            Poll::Ready(())
        })
        .await;
        let mut place = Place::new(lane.clone());
        for _ in 0..1000 {
            assert!(takes(&mut place, TURN_BYTES / 10).await);
            sleep(CALM / 9).await;
        }
        assert!(takes(&mut place, 100 * TURN_BYTES).await, "one that is large at once");
        sleep(CALM / 2).await;
        assert!(!takes(&mut place, 0).await, "but then it waits");
        assert_eq!(lane.waiting(), 1);
        drop(place);
        let mut place = Place::new(lane.clone());
        assert!(takes(&mut place, 100 * TURN_BYTES).await);
        sleep(CALM * REMEMBERED as u32).await;
        assert!(takes(&mut place, TURN_BYTES).await, "all of it is forgiven");
        assert!(!takes(&mut place, 0).await);
        // And then it is its turn.
        drop(flood);
        assert!(takes(&mut place, 0).await);
        assert_eq!((lane.waiting(), lane.lock().called.len()), (0, 0));
    }
}
