//! Relays one event stream: a pump reads the upstream on while the node is slow, the body hands the node what the
//! queue lets out.
//!
//! The pump is the one task of an exchange. It is owned by the body: dropping the body (the node left) aborts it, which
//! drops the upstream's body, which closes the upstream's stream. Between the two stands [`Queue`] under one short lock.
//! The exchange itself lives there too, so that its record is written when both are gone.
//!
//! The pump takes every chunk that is ready before it wakes the body, and the body gives everything the queue lets out
//! as one frame: a busy stream costs one task switch for many events.

mod body;

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use tokio::time::{Instant, Sleep, sleep_until};

use self::body::StreamBody;
use super::{
    Settings,
    assembly::Assembly,
    body::Body,
    clocks::{Clock, Clocks},
    decode::Decoder,
    listen::{self, Attempt, Listen, Look},
    queue::{Class, Queue, mark_refetch},
    source::{Seen, Source},
    sse::{Event, Scanner},
};
use crate::{
    account::{CancelledBy, Outcome},
    error::{self, Failure, Reason},
    exchange::{self, Exchange},
    inflight::Running,
    ledger::{Claim, Ledger},
    limits::Held,
    message::{Era, Id, answer},
    server::Peer,
    store::BoxFuture,
    upstream,
};

/// After the final response of a modern stream the upstream has this long to end it.
const LINGER: Duration = Duration::from_millis(500);
/// Chunks that the pump takes before it lets others run ...
const CHUNKS: usize = 32;
/// ... or bytes: of many floods each has its turn, and whoever is behind them waits for all of those.
const TURN: usize = 64 * 1024;
/// Encoded bytes that are decoded at once: what comes of them has to be held, and that may be a thousand times as much.
const PIECE: usize = 256;
/// More than a piece can decode to.
const DECODED: usize = 1024 * 1024;
/// Bytes that the body gives as one frame, unless one event alone is larger.
const FRAME: usize = 64 * 1024;
/// The most of such an event.
const LARGEST: usize = 4 * FRAME;
/// Later than any progress may wait for its rate.
const PAST_ALL_RATES: Duration = Duration::from_secs(365 * 24 * 3600);
/// Goes before the sidecar's own error when progress was dropped.
const REFETCH: &[u8] = b": refetch\n\n";

/// Everything a relayed stream begins with.
#[derive(Debug)]
pub struct Start {
    /// The exchange; its `request`, if any, tells which response ends the stream.
    pub exchange: Exchange,
    /// The ids that await a response: one for a request, several for a batch, none for a `GET`.
    pub awaited: Vec<Id>,
    /// A stream that no response has to end: a `GET`, or a subscription. Dropped by the upstream, it just ends.
    pub endless: bool,
    /// A subscription that is asked for again instead.
    pub listen: Option<Listen>,
    /// The upstream's body.
    pub upstream: upstream::Body,
    /// Knows the progress tokens that sidecars add.
    pub ledger: Arc<Ledger>,
    /// The body's coding, when the upstream compressed all the same.
    pub decoder: Option<Decoder>,
    /// How to relay.
    pub settings: Settings,
    /// The clocks as they stand.
    pub clocks: Clocks,
    /// Bytes of one event at most.
    pub event_limit: usize,
    /// A node that takes nothing for this long is given up.
    pub client_stall: Duration,
    /// How long a legacy stream may go on after its response without a sign.
    pub idle_timeout: Duration,
    /// Counts the bytes held, together with all other streams.
    pub held: Held,
    /// The node's connection.
    pub peer: Peer,
}

/// Starts the pump and gives the body that owns it.
pub fn relay(start: Start) -> Body {
    let running = start.exchange.entry.as_ref().map(|entry| entry.running.clone());
    let now = Instant::now();
    let assembly = Assembly::new(start.held.another(), start.event_limit);
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            queue: Queue::new(start.settings.clone()),
            held: start.held,
            last_words: None,
            parting: false,
            ended: false,
            cut: false,
            muted: false,
            begun: false,
            reader: None,
            pump: None,
            taken: now,
            final_outcome: Outcome::Ok,
            events: 0,
            bytes_out: 0,
            keepalives: 0,
            out: Vec::new(),
            out_bytes: 0,
            out_final: false,
            ours_last: false,
            half_line_end: false,
            exchange: start.exchange,
        }),
    });
    let mut state = shared.lock();
    let era = state.exchange.era;
    let request = state.exchange.request.as_ref();
    let token = request.and_then(|request| request.progress_token.clone());
    let added = request.and_then(|request| request.added_token.clone());
    state.held.set(0);
    drop(state);
    let pump = Pump {
        upstream: Some(Upstream::Open(start.upstream)),
        listen: start.listen.map(Box::new),
        event_limit: start.event_limit,
        decoder: start.decoder,
        scanner: Scanner::new(start.event_limit),
        assembly,
        encoded: Bytes::new(),
        backlog: VecDeque::new(),
        settling: None,
        parting: None,
        closing: None,
        source: Source {
            era,
            token,
            added,
            ledger: start.ledger,
            awaited: start.awaited,
            had: Vec::new(),
            endless: start.endless,
            ids_seen: false,
            answered: false,
        },
        clocks: start.clocks,
        asking: false,
        blocked: false,
        linger: None,
        idle_timeout: start.idle_timeout,
        client_stall: start.client_stall,
        timer: Box::pin(sleep_until(now)),
        running,
        shared: shared.clone(),
    };
    Body::new(StreamBody::new(tokio::spawn(pump), shared, start.settings.keepalive, start.peer))
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
}

impl Shared {
    /// A poisoned lock means that a holder panicked between plain assignments; the stream ends with its exchange.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct State {
    queue: Queue,
    held: Held,
    /// What the sidecar itself says at the end, after everything in the queue.
    last_words: Option<Bytes>,
    /// They wait until the end of the call is stored: its node may make the next attempt as soon as it has them.
    parting: bool,
    /// Nothing more will be pushed.
    ended: bool,
    /// The node is given up: the body ends as broken.
    cut: bool,
    /// A cancel won: the node gets nothing more.
    muted: bool,
    /// The body was polled.
    begun: bool,
    reader: Option<Waker>,
    /// The pump, while it waits for the node to read.
    pump: Option<Waker>,
    /// When the node last took something, or there was nothing to take.
    taken: Instant,
    final_outcome: Outcome,
    events: u64,
    bytes_out: u64,
    keepalives: u64,
    /// Given out by the queue, not yet taken by the node's connection.
    out: Vec<Bytes>,
    out_bytes: usize,
    out_final: bool,
    /// The last bytes to the node were a comment of ours.
    ours_last: bool,
    /// They end within a CRLF, as far as one can tell: its LF is to come, and nothing of ours before it.
    half_line_end: bool,
    exchange: Exchange,
}

impl State {
    /// Takes from the queue what it lets out now, up to a frame.
    fn fill(&mut self, now: Instant) {
        // At the end nothing is worth waiting for its rate any more.
        let now = if self.ended { now + PAST_ALL_RATES } else { now };
        while self.out_bytes < FRAME && !self.muted {
            let Some(popped) = self.queue.pop(now) else { break };
            let bytes = if popped.refetch { mark_refetch(&popped.event) } else { popped.event.bytes };
            if !self.ours_last || self.out_bytes > 0 {
                self.put(popped.event.prefix);
            }
            self.events += u64::from(popped.event.data.is_some());
            self.out_final |= popped.is_final;
            self.put(bytes);
        }
    }

    fn put(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.out_bytes += bytes.len();
            self.out.push(bytes);
        }
    }

    /// Everything for the node, as one frame.
    fn take(&mut self, now: Instant) -> Option<Bytes> {
        if self.muted {
            return None;
        }
        self.fill(now);
        if self.queue.is_empty()
            && !self.parting
            && let Some(words) = self.last_words.take()
        {
            self.events += 1;
            if self.queue.counts().refetch {
                self.put(Bytes::from_static(REFETCH));
            }
            self.put(words);
        }
        let mut bytes: Bytes = match self.out.as_mut_slice() {
            [] => return None,
            [one] => std::mem::take(one),
            all => all.concat().into(),
        };
        self.out.clear();
        // What hyper has taken is counted no more, so it gets no more than a slow node can hold up there.
        let rest = bytes.split_off(bytes.len().min(LARGEST));
        self.out_bytes = rest.len();
        self.out.extend(Some(rest).filter(|rest| !rest.is_empty()));
        self.ours_last = false;
        self.taken = now;
        self.bytes_out += bytes.len() as u64;
        self.count_held();
        if self.out.is_empty() && std::mem::take(&mut self.out_final) {
            let outcome = self.final_outcome;
            self.exchange.completed(outcome);
        }
        if let Some(pump) = self.pump.take() {
            pump.wake();
        }
        Some(bytes)
    }

    /// Takes one event for the node.
    fn push(&mut self, event: Event, class: Class, now: Instant) {
        if self.muted {
            return;
        }
        if self.queue.is_empty() {
            self.taken = now;
        }
        self.queue.push(event, class, now);
        // While the node keeps up its connection waits for more, or has not begun to: what may go out goes out as it
        // came, and only what is behind that can become adjacent and coalesce.
        if self.reader.is_some() || !self.begun {
            self.fill(now);
        }
        self.queue.detach_newest();
    }

    /// Notes the request's progress.
    fn progress(&mut self, progress: f64, total: Option<f64>, token: Option<&str>) {
        let record = &mut self.exchange.account.record;
        if record.progress.is_none_or(|before| progress > before) {
            record.progress = Some(progress);
            record.total = total;
        }
        let takes_part = self.exchange.request.as_ref().is_some_and(|request| request.resumable);
        if let Some(claim) = &mut self.exchange.claim {
            claim.progress(progress, total, token.filter(|_| takes_part));
        }
    }

    /// Whether the pump may push this event. A muted stream takes everything, and forgets it.
    fn has_room(&self, event: Option<&Event>) -> bool {
        self.muted
            || event.is_none_or(|event| self.queue.fits(event.bytes.len() + event.prefix.len()))
                && self.held.has_room(self.queue.is_empty() && self.out.is_empty())
    }

    fn count_held(&mut self) {
        let bytes = self.queue.bytes() + self.out_bytes;
        self.held.set(bytes);
    }

    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.wake_reader();
    }

    fn mute(&mut self) {
        self.muted = true;
        self.out.clear();
        self.out_bytes = 0;
        self.held.set(0);
    }

    /// Nothing waits for the node.
    fn drained(&self) -> bool {
        self.muted || self.cut || (self.queue.is_empty() && self.out.is_empty() && self.last_words.is_none())
    }
}

impl State {
    /// Tells the exchange what passed.
    fn tell(&mut self) {
        let counts = self.queue.counts();
        let record = &mut self.exchange.account.record;
        record.events = Some(self.events);
        record.bytes_out = Some(self.bytes_out);
        record.keepalives = Some(self.keepalives);
        record.progress_in = Some(counts.progress_in);
        record.progress_out = Some(counts.progress_out);
        record.progress_coalesced = Some(counts.coalesced);
        record.progress_dropped = Some(counts.dropped);
        record.refetch = counts.refetch.then_some(true);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.tell();
    }
}

struct Pump {
    upstream: Option<Upstream>,
    /// A subscription that heals.
    listen: Option<Box<Listen>>,
    event_limit: usize,
    decoder: Option<Decoder>,
    /// What of the chunk at hand is still to be decoded.
    encoded: Bytes,
    scanner: Scanner,
    /// Counts what the scanner holds.
    assembly: Assembly,
    /// Events of the chunk at hand that the queue has no room for yet.
    backlog: VecDeque<Event>,
    /// A response that waits until its end is stored.
    settling: Option<Settling>,
    /// The stream has failed, and the end of its call is being stored.
    parting: Option<BoxFuture<'static, ()>>,
    /// The upstream's stream has ended; what was found still goes out.
    closing: Option<Closing>,
    source: Source,
    clocks: Clocks,
    asking: bool,
    blocked: bool,
    linger: Option<Instant>,
    idle_timeout: Duration,
    client_stall: Duration,
    timer: Pin<Box<Sleep>>,
    running: Option<Arc<Running>>,
    shared: Arc<Shared>,
}

/// The upstream's side of the stream. Dropping it closes the upstream's stream, or ends the attempt to have one again.
enum Upstream {
    Open(upstream::Body),
    Dropped(Attempt),
}

/// A response that goes out once this is done: its end is stored, its tools are learnt.
struct Settling {
    work: BoxFuture<'static, ()>,
    event: Event,
    class: Class,
}

/// How the upstream's stream ended.
enum Closing {
    /// Cleanly.
    Finished,
    /// It broke.
    Broken(Failure),
    /// It cannot be relayed.
    Unfit(Failure),
}

impl Future for Pump {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.upstream.is_some() && !self.poll_ended_from_outside(cx) {
            self.poll_upstream(cx);
            self.stand_still();
        }
        ready!(self.poll_parted(cx));
        if self.upstream.is_none() {
            self.assembly.end();
        }
        self.poll_drained(cx)
    }
}

impl Pump {
    /// A cancel, a drain or an operator ended the stream.
    fn poll_ended_from_outside(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(running) = self.running.clone() else { return false };
        let closed = running.poll_closed(cx).is_ready();
        let by = running.cancelled().map(|(by, _)| by);
        if running.is_won() && matches!(by, Some(CancelledBy::Notification)) {
            self.shared.lock().mute();
        }
        if !closed {
            return false;
        }
        self.release();
        self.let_go();
        let mut state = self.shared.lock();
        match by.and_then(exchange::told).or_else(|| exchange::lease_lost(&running)) {
            Some(failure) => self.parting = fail(&mut state, &self.source, &failure),
            // The response is complete: what of it still waits for the node goes out, within the last words.
            None if self.source.answered && by.is_none() => {}
            // A cancel by message, or a stream that ends as the drain begins: it just ends.
            None => {
                state.exchange.end(Outcome::Cancelled);
                let record = &mut state.exchange.account.record;
                record.cancelled_by = Some(by.unwrap_or(CancelledBy::Drain));
                record.cancel_ms = running.cancelled().map(|(_, at)| at.elapsed());
            }
        }
        state.parting = self.parting.is_some();
        state.end();
        true
    }

    /// Ready when no last words wait for the end of their call to be stored.
    fn poll_parted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(parting) = &mut self.parting {
            ready!(parting.as_mut().poll(cx));
            self.parting = None;
            let mut state = self.shared.lock();
            state.parting = false;
            state.wake_reader();
        }
        Poll::Ready(())
    }

    fn poll_upstream(&mut self, cx: &mut Context<'_>) {
        let mut taken = 0;
        for _ in 0..CHUNKS {
            if taken >= TURN {
                break;
            }
            let ends = self.closing.is_some() && !self.heals();
            let goes_on = self.poll_settled(cx).is_ready() && (ends || self.deliver(cx));
            if !goes_on {
                return self.flush();
            }
            if self.settling.is_some() {
                continue;
            }
            if self.closing.is_some() {
                self.deliver_all();
                if self.settling.is_none() {
                    self.close();
                }
                if self.upstream.is_none() {
                    return;
                }
                continue;
            }
            if self.assembly.poll_room(self.scanner.held(), cx).is_pending() {
                return self.flush();
            }
            let chunk = self.poll_chunk(cx);
            match chunk {
                Poll::Ready(_) => self.assembly.fed(),
                Poll::Pending => self.assembly.poll_starved(cx),
            }
            match chunk {
                Poll::Ready(Some(Ok(chunk))) => {
                    taken += chunk.len();
                    self.closing = self.take(chunk).err().map(Closing::Unfit);
                }
                Poll::Ready(Some(Err(failure))) => self.closing = Some(Closing::Broken(failure)),
                Poll::Ready(None) => self.closing = Some(self.finished()),
                Poll::Pending => return self.flush(),
            }
        }
        self.flush();
        cx.waker().wake_by_ref();
    }

    /// A response that still waits goes out now: whoever was to store its end does so without it.
    fn release(&mut self) {
        if let Some(Settling { event, class, .. }) = self.settling.take() {
            self.shared.lock().push(event, class, Instant::now());
        }
    }

    /// Ready when no response waits for its end to be stored; one that did goes out.
    fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(settling) = &mut self.settling else { return Poll::Ready(()) };
        ready!(settling.work.as_mut().poll(cx));
        self.release();
        Poll::Ready(())
    }

    /// The next bytes to look at: what is left of a chunk that is decoded piece by piece, or the upstream's next.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        if !self.encoded.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut self.encoded))));
        }
        if let Some(Upstream::Dropped(attempt)) = &mut self.upstream {
            let answer = ready!(attempt.as_mut().poll(cx));
            if let Err(failure) = self.reopened(answer) {
                return Poll::Ready(Some(Err(failure)));
            }
        }
        if self.listen.as_mut().is_some_and(|listen| listen.poll_overdue(cx).is_ready()) {
            let silent = Failure::upstream("the upstream did not acknowledge the subscription");
            return Poll::Ready(Some(Err(silent)));
        }
        match &mut self.upstream {
            Some(Upstream::Open(body)) => poll_data(body, cx).map(|data| data.map(|data| Ok(data?))),
            Some(Upstream::Dropped(_)) | None => Poll::Pending,
        }
    }

    /// An attempt to have a dropped subscription again brought this.
    fn reopened(&mut self, answer: listen::Answer) -> Result<(), Failure> {
        let Some(listen) = &mut self.listen else { return Ok(()) };
        let (body, decoder) = listen.reopened(answer)?;
        self.upstream = Some(Upstream::Open(body));
        self.decoder = decoder;
        self.scanner = Scanner::new(self.event_limit);
        Ok(())
    }

    /// Finds the events of a chunk, or of the first piece of it.
    fn take(&mut self, mut chunk: Bytes) -> Result<(), Failure> {
        if let Some(decoder) = &mut self.decoder {
            self.encoded = chunk.split_off(chunk.len().min(PIECE));
            chunk = decoder
                .push(&chunk, DECODED)
                .map_err(|error| Failure::upstream(format!("upstream's encoding is broken: {error}")))?;
        }
        let backlog = &mut self.backlog;
        self.scanner
            .push(chunk, |event| backlog.push_back(event))
            .map_err(|error| Failure::upstream(format!("upstream's stream: {error}")))
    }

    /// Moves what was found into the queue. False: the queue has no room, the body will wake the pump.
    fn deliver(&mut self, cx: &mut Context<'_>) -> bool {
        if self.upcoming().is_none() {
            return true;
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while self.settling.is_none() && state.has_room(self.upcoming()) {
            if !self.give_next(&mut state) {
                state.count_held();
                return true;
            }
        }
        if self.settling.is_some() {
            return true;
        }
        state.pump = Some(cx.waker().clone());
        false
    }

    /// The stream is at its end: what was found goes into the queue although it may be full, since reading stopped.
    fn deliver_all(&mut self) {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        while self.settling.is_none() && self.give_next(&mut state) {}
    }

    /// What goes out next: the sidecar's own words on a subscription that is back, or what was found.
    fn upcoming(&mut self) -> Option<&Event> {
        self.listen.as_mut().and_then(|listen| listen.change()).or(self.backlog.front())
    }

    /// Gives that; false if there is nothing.
    fn give_next(&mut self, state: &mut State) -> bool {
        if let Some(listen) = &mut self.listen
            && listen.change().is_some()
        {
            if let Some(change) = listen.take_change() {
                state.push(change, Class::Kept, Instant::now());
            }
            return true;
        }
        let Some(event) = self.backlog.pop_front() else { return false };
        self.give(state, event);
        true
    }

    fn give(&mut self, state: &mut State, event: Event) {
        let now = Instant::now();
        let look = match &mut self.listen {
            Some(listen) => listen.see(event, now),
            None => Look::Pass(event),
        };
        let event = match look {
            Look::Pass(event) => event,
            Look::Keep => return,
            Look::End => {
                self.backlog.clear();
                self.closing = Some(Closing::Finished);
                return;
            }
        };
        if let Some(id) = &event.id {
            self.source.ids_seen = !id.is_empty();
            if let Some(notice) = state.exchange.request.as_mut().and_then(|request| request.notice.as_mut())
            {
                notice.event_id(id);
                notice.retry = event.retry.map_or(notice.retry, Duration::from_millis);
            }
        }
        if event.bytes.is_empty() {
            // The LF of a CRLF whose CR ended the event before: it follows that event directly, or is needless.
            if state.queue.is_empty() && !state.ours_last && !state.muted {
                state.put(event.prefix);
            }
            return;
        }
        let seen = self.source.see(event);
        if seen.message {
            self.clocks.message(now);
        }
        if seen.forged > 0 {
            state.exchange.account.forged(seen.forged);
        }
        if let (Some(id), Some(entry)) = (&seen.asks, &state.exchange.entry) {
            entry.server_asks(id.clone());
        }
        if let Some((progress, total, token)) = &seen.progress {
            state.progress(*progress, *total, token.as_deref());
        }
        if let (Some((call, progress)), Some(resumes)) = (&seen.parked, &state.exchange.resumes) {
            resumes.ledger.parked_progress(&resumes.scope, call, progress);
        }
        if let Some(outcome) = seen.outcome {
            if !state.exchange.answered() {
                // A cancel came first, and is told at the next turn: the response stays awaited.
                self.source.answered = false;
                self.source.awaited.extend(state.exchange.id().cloned());
                return;
            }
            state.final_outcome = outcome;
            self.clocks = Clocks::new(now, None, None);
            let grace = if self.source.era == Era::Modern { LINGER } else { self.idle_timeout };
            self.linger = Some(now + grace);
        } else if self.source.answered && self.source.era == Era::Legacy {
            self.linger = Some(now + self.idle_timeout);
        }
        let Some(class) = seen.class.clone() else {
            if !seen.kept_back {
                state.queue.stray();
            }
            return;
        };
        match settles(state, &seen) {
            Some(work) => self.settling = Some(Settling { work, event: seen.event, class }),
            None => state.push(seen.event, class, now),
        }
    }

    /// Wakes the body if there is something for it.
    fn flush(&self) {
        let mut state = self.shared.lock();
        if !state.drained() {
            state.wake_reader();
        }
    }

    /// The upstream ended its stream cleanly. The last event still counts if it lacks its empty line and is what the stream
    /// is there for.
    fn finished(&mut self) -> Closing {
        if let Some(Err(error)) = self.decoder.as_mut().map(Decoder::finish) {
            return Closing::Broken(Failure::upstream(format!("upstream's encoding: {error}")));
        }
        let last = self.scanner.finish();
        let last = match &self.listen {
            Some(listen) => last.map(|last| listen.renamed(last)),
            None => last,
        };
        if let Some(last) = last
            && last.data.as_deref().and_then(answer::look).is_some_and(|last| self.source.awaits(&last))
        {
            self.backlog.push_back(last);
        }
        Closing::Finished
    }

    /// Whether the end of the upstream's stream is none for the node.
    fn heals(&self) -> bool {
        let dropped = matches!(self.closing, Some(Closing::Finished | Closing::Broken(_)));
        dropped && !self.source.answered && self.listen.as_ref().is_some_and(|listen| listen.heals())
    }

    /// Asks for a dropped subscription again; false if it is given up.
    fn listen_again(&mut self) -> bool {
        let why = match &self.closing {
            Some(Closing::Broken(failure)) => &failure.message,
            _ => "the upstream ended its stream",
        };
        let attempt = self.listen.as_mut().and_then(|listen| listen.again(why, Instant::now()));
        let Some(attempt) = attempt else { return false };
        self.upstream = Some(Upstream::Dropped(attempt));
        self.closing = None;
        self.encoded = Bytes::new();
        true
    }

    /// Holds nothing of the upstream's any more, nor what would ask it again.
    fn let_go(&mut self) {
        self.upstream = None;
        self.listen = None;
    }

    /// Everything that was found has gone out: ends the node's stream as the upstream's ended.
    fn close(&mut self) {
        if self.heals() && self.listen_again() {
            return;
        }
        let lost = !self.source.awaited.is_empty();
        match self.closing.take() {
            Some(Closing::Unfit(failure)) => self.fail(&failure),
            Some(Closing::Broken(failure)) if lost && !self.resumable() => self.fail(&failure),
            Some(Closing::Finished) if lost && !self.resumable() => {
                self.fail(&Failure::upstream("the upstream ended its stream without the response"));
            }
            _ => self.end(),
        }
    }

    /// Legacy streams with event ids just end: the node resumes. A subscription that is
    /// dropped does too: the node listens again.
    fn resumable(&self) -> bool {
        self.source.endless || self.source.era == Era::Legacy && self.source.ids_seen
    }

    fn end(&mut self) {
        self.release();
        self.let_go();
        let mut state = self.shared.lock();
        state.exchange.upstream_ended = true;
        if self.source.ids_seen {
            // Its response may still come on a `GET` of the session.
            state.exchange.park();
        }
        state.end();
    }

    /// Ends with the failure's error, unless a cancel has won or everything is answered.
    fn fail(&mut self, failure: &Failure) {
        self.let_go();
        let mut state = self.shared.lock();
        self.parting = fail(&mut state, &self.source, failure);
        state.parting = self.parting.is_some();
        state.exchange.upstream_ended = failure.reason == Reason::UpstreamFailed;
        state.end();
    }

    /// The idle clock stands still while the node owes an answer, or does not read.
    fn stand_still(&mut self) {
        let now = Instant::now();
        let asking = self.running.as_ref().is_some_and(|running| running.awaits_node());
        let blocked = !self.backlog.is_empty() || self.assembly.waits();
        for (was, is) in [(&mut self.asking, asking), (&mut self.blocked, blocked)] {
            if *was != is {
                if is {
                    self.clocks.pause(now)
                } else {
                    self.clocks.resume(now)
                }
                *was = is;
            }
        }
    }

    /// Runs the timer; ready when the upstream has ended and the node has taken everything.
    fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.poll_parted(cx));
            let (stall, drained) = {
                let mut state = self.shared.lock();
                let drained = state.drained();
                if self.upstream.is_none() {
                    if drained {
                        return Poll::Ready(());
                    }
                    state.pump = Some(cx.waker().clone());
                }
                ((!drained).then(|| state.taken + self.client_stall), drained)
            };
            let _ = drained;
            let clock = self.upstream.as_ref().and_then(|_| self.clocks.deadline()).map(|(at, _)| at);
            let linger = self.upstream.as_ref().and(self.linger);
            let Some(next) = [stall, clock, linger].into_iter().flatten().min() else {
                return Poll::Pending;
            };
            let late = self.timer.is_elapsed() || self.timer.deadline() > next;
            if late {
                self.timer.as_mut().reset(next);
            }
            ready!(self.timer.as_mut().poll(cx));
            self.expired(Instant::now());
        }
    }

    fn expired(&mut self, now: Instant) {
        if self.upstream.is_some() {
            if let Some(clock) = self.clocks.expired(now) {
                let (reason, message) = match clock {
                    Clock::Idle => (Reason::IdleTimeout, "the upstream was silent for the idle timeout"),
                    Clock::Max => (Reason::MaxTimeout, "the call reached its maximum time"),
                };
                self.deliver_all();
                if self.source.answered {
                    return;
                }
                return self.fail(&Failure::unknown(reason, message));
            }
            if self.linger.is_some_and(|at| now >= at) {
                return self.end();
            }
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        if !state.drained() && now >= state.taken + self.client_stall {
            self.let_go();
            state.cut = true;
            state.mute();
            state.exchange.left = Some(now);
            state.tell();
            // An HTTP/2 stream without a window is not asked for its body any more, and holds on to it.
            state.exchange.close();
            state.end();
        }
    }
}

/// The next bytes of a body; trailers mean nothing here.
fn poll_data(
    body: &mut upstream::Body,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Bytes, upstream::Error>>> {
    loop {
        match ready!(Pin::new(&mut *body).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Poll::Ready(Some(Ok(data)));
                }
            }
            Some(Err(error)) => return Poll::Ready(Some(Err(error))),
            None => return Poll::Ready(None),
        }
    }
}

/// What has to be done before a response goes out.
fn settles(state: &mut State, seen: &Seen) -> Option<BoxFuture<'static, ()>> {
    let response = seen.response.as_ref()?;
    let data = seen.event.data.clone()?;
    let exchange = &mut state.exchange;
    let claim = if seen.outcome.is_some() {
        if let Some(learns) = exchange.learns.take() {
            return Some(learns.learn(data));
        }
        exchange.claim.take()
    } else {
        let id = response.id.as_ref()?;
        exchange.resumes.as_ref().and_then(|resumes| resumes.ledger.unpark(&resumes.scope, id))
    };
    let claim = claim?;
    let (ends, result, ttl) = exchange::settlement(&data, response, claim.is_task());
    Some(claim.finish(ends, result, ttl))
}

/// The error a node reads as the stream's last events, one for each id that still awaits its response. Gives what has to be
/// done first: the end of the call is stored.
fn fail(state: &mut State, source: &Source, failure: &Failure) -> Option<BoxFuture<'static, ()>> {
    let cancelled = state.exchange.entry.as_ref().and_then(|entry| entry.running.cancelled());
    let cancelled = cancelled.map(|(by, _)| exchange::told(by));
    let failure = match &cancelled {
        _ if state.muted => return None,
        Some(None) => return None,
        Some(Some(told)) => told,
        None => failure,
    };
    state.exchange.fail(failure);
    if failure.reason != Reason::UpstreamFailed {
        if let Some(notice) = state.exchange.request.as_mut().and_then(|request| request.notice.as_mut()) {
            notice.now = true;
        }
        state.exchange.notify_upstream();
    }
    let mut words = BytesMut::new();
    for id in &source.awaited {
        let request = &state.exchange.account.record.request;
        let body =
            error::body(failure, Some(id), state.exchange.upstream(), request, state.exchange.progress());
        words.extend_from_slice(b"event: message\ndata: ");
        words.extend_from_slice(&body);
        words.extend_from_slice(b"\n\n");
    }
    state.last_words = (!words.is_empty()).then(|| words.freeze());
    state.exchange.claim.take().map(Claim::settle)
}
