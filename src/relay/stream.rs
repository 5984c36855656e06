//! Relays one event stream: a pump reads the upstream on while the node is slow, the body hands the node what the
//! queue lets out.
//!
//! The pump is owned by the body: dropping the body (the node left) ends it, which drops the upstream's body, which closes
//! the upstream's stream. Whoever writes the body polls the pump too, so that an event wakes one task; where that is hyper,
//! which polls nothing that its client has no room for, the pump has a task of its own. Between pump and body stands
//! [`Queue`] under one short lock. The exchange itself lives there too, so that its record is written when both are gone.
//!
//! The pump takes every chunk that is ready before it wakes the body, and the body gives everything the queue lets out
//! as one frame: many events of a busy stream go out at once. What most of those are is seen where they lie in
//! their chunk (`plain`); only the others are made events and weighed one by one.

mod body;
mod end;
mod give;
mod plain;
mod state;
mod watch;

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body as _;
use tokio::time::Instant;

pub(super) use self::body::StreamBody;
use self::{
    plain::Known,
    state::{FRAME, Shared, State},
};
use super::{
    Settings,
    alarm::Alarm,
    assembly::Assembly,
    body::Body,
    clocks::Clocks,
    decode::Decoder,
    lane::{self, Lane, TURN_BYTES},
    listen::{self, Attempt, Listen},
    queue::{Class, Queue},
    source::Source,
    sse::{Event, Scanner, TooLarge},
};
use crate::{
    account::Outcome, error::Failure, exchange::Exchange, inflight::Running, ledger::Ledger, limits::Held,
    message::Id, server::Peer, store::BoxFuture, upstream,
};

/// After the final response of a modern stream the upstream has this long to end it.
const LINGER: Duration = Duration::from_millis(500);
/// Chunks that the pump takes before it lets others run, or bytes of a turn.
const CHUNKS: usize = 32;
/// Turns after which the body is woken at the latest, while the upstream has ever more.
const TURNS: u8 = 4;
/// Encoded bytes that are decoded at once: what comes of them has to be held, and that may be a thousand times as much.
const PIECE: usize = 256;
/// More than a piece can decode to.
const DECODED: usize = 1024 * 1024;

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
    /// Where streams that have ever more to read take turns.
    pub lane: Arc<Lane>,
    /// The node's connection.
    pub peer: Peer,
}

/// Gives the body, and with it the pump.
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
            awaited: None,
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
            exchange: Box::new(start.exchange),
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
        rest: Bytes::new(),
        known: None,
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
        place: lane::Place::new(start.lane),
        turns: 0,
        linger: None,
        idle_timeout: start.idle_timeout,
        client_stall: start.client_stall,
        alarm: Alarm::default(),
        now,
        running,
        shared: shared.clone(),
    };
    Body::stream(StreamBody::new(pump, shared, start.settings.keepalive, start.peer))
}

struct Pump {
    upstream: Option<Upstream>,
    /// A subscription that heals.
    listen: Option<Box<Listen>>,
    event_limit: usize,
    decoder: Option<Decoder>,
    /// What of the chunk at hand is still to be looked at; decoded first, where there is a coding.
    rest: Bytes,
    scanner: Scanner,
    /// The progress that was seen last.
    known: Option<Known>,
    /// Counts what the scanner holds.
    assembly: Assembly,
    /// Events of the chunk at hand that the queue has no room for yet.
    backlog: VecDeque<Event>,
    /// A response that waits until its end is stored.
    settling: Option<Box<Settling>>,
    /// The stream has failed, and the end of its call is being stored.
    parting: Option<BoxFuture<'static, ()>>,
    /// The upstream's stream has ended; what was found still goes out.
    closing: Option<Closing>,
    source: Source,
    clocks: Clocks,
    asking: bool,
    blocked: bool,
    /// In the lane.
    place: lane::Place,
    /// Turns since the body was woken.
    turns: u8,
    linger: Option<Instant>,
    idle_timeout: Duration,
    client_stall: Duration,
    alarm: Alarm,
    /// When it was polled.
    now: Instant,
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
        self.now = Instant::now();
        if self.upstream.is_some() && !self.poll_ended_from_outside(cx) {
            self.poll_upstream(cx);
            self.stand_still();
        }
        if self.upstream.is_none() {
            self.place.leave();
            self.assembly.end();
        }
        ready!(self.poll_parted(cx));
        self.poll_drained(cx)
    }
}

impl Pump {
    fn poll_upstream(&mut self, cx: &mut Context<'_>) {
        if self.place.poll_turn(cx).is_pending() {
            return;
        }
        let mut taken = 0;
        match self.take_turn(&mut taken, cx) {
            true => self.place.took_some(taken, cx),
            false => self.place.took_all(taken),
        }
    }

    /// Takes what is ready, up to a turn of bytes; false if that was all for now.
    fn take_turn(&mut self, taken: &mut usize, cx: &mut Context<'_>) -> bool {
        for _ in 0..CHUNKS {
            if *taken >= TURN_BYTES {
                break;
            }
            let ends = self.closing.is_some() && !self.heals();
            let goes_on = self.poll_settled(cx).is_ready() && (ends || self.deliver(cx));
            if !goes_on {
                self.flush();
                return false;
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
                    return false;
                }
                continue;
            }
            if *taken > 0 && self.is_full() {
                break;
            }
            if self.assembly.poll_room(self.scanner.held(), cx).is_pending() {
                self.flush();
                return false;
            }
            let chunk = self.poll_chunk(cx);
            match chunk {
                Poll::Ready(_) => self.assembly.fed(),
                Poll::Pending => self.assembly.poll_starved(cx),
            }
            match chunk {
                Poll::Ready(Some(Ok(chunk))) => {
                    self.closing = self.take(chunk, taken).err().map(Closing::Unfit);
                }
                Poll::Ready(Some(Err(failure))) => self.closing = Some(Closing::Broken(failure)),
                Poll::Ready(None) => self.closing = Some(self.finished()),
                Poll::Pending => {
                    self.flush();
                    return false;
                }
            }
        }
        // The pump comes again before the node has had less: large pieces cost both sides less than many small ones.
        self.turns += 1;
        if self.turns == TURNS || self.is_full() {
            self.flush();
        }
        true
    }

    /// The node waits, and there is enough for it: it should have that first.
    fn is_full(&self) -> bool {
        let state = self.shared.lock();
        state.reader.is_some() && state.out_bytes >= FRAME / 2
    }

    /// A response that still waits goes out now: whoever was to store its end does so without it.
    fn release(&mut self) {
        if let Some(settling) = self.settling.take() {
            self.shared.lock().push(settling.event, settling.class, self.now);
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
        if !self.rest.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut self.rest))));
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

    /// Finds the events of a chunk, or of the first piece of it; counts the bytes that were looked at, which are many more
    /// than came where those were compressed well.
    fn take(&mut self, chunk: Bytes, taken: &mut usize) -> Result<(), Failure> {
        let came = chunk.len();
        let found = self.find(chunk, taken);
        *taken += came.saturating_sub(self.rest.len());
        found
    }

    fn find(&mut self, mut chunk: Bytes, taken: &mut usize) -> Result<(), Failure> {
        if let Some(decoder) = &mut self.decoder {
            self.rest = chunk.split_off(chunk.len().min(PIECE));
            chunk = decoder
                .push(&chunk, DECODED)
                .map_err(|error| Failure::upstream(format!("upstream's encoding is broken: {error}")))?;
            *taken += chunk.len();
        }
        if self.decoder.is_none() && self.scanner.is_between() {
            self.pass_plain(&mut chunk);
            if chunk.is_empty() {
                return Ok(());
            }
        } else if let Some(event) = self.scanner.next(&mut chunk).map_err(unfit)? {
            // The event that was cut is whole now; what follows may be plain again.
            self.backlog.push_back(event);
            if self.decoder.is_none() {
                self.rest = chunk;
                return Ok(());
            }
        }
        let backlog = &mut self.backlog;
        self.scanner.push(chunk, |event| backlog.push_back(event)).map_err(unfit)
    }

    /// Finds what else has come, though there may be no room for it: nothing is read any more.
    fn scan_rest(&mut self) {
        if self.decoder.is_none() {
            let (rest, backlog) = (std::mem::take(&mut self.rest), &mut self.backlog);
            // What is too large is no response that came whole.
            let _ = self.scanner.push(rest, |event| backlog.push_back(event));
        }
    }

    /// Wakes the body if there is something for it.
    fn flush(&mut self) {
        self.turns = 0;
        let mut state = self.shared.lock();
        if state.has_news() {
            state.wake_reader();
        }
    }
}

fn unfit(error: TooLarge) -> Failure {
    Failure::upstream(format!("upstream's stream: {error}"))
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
