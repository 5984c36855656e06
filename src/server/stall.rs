//! Ends an HTTP/2 stream whose client grants it no window: hyper asks such a stream's body for nothing more, so nothing of
//! the response itself could notice.
//!
//! The future that hyper spawns for a stream says, turn by turn, what it waits for: the service, the body, or the client.
//! Only the last has a clock, which is made when it is first needed and begins anew with whatever the client takes.

use std::{
    cell::Cell,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep};

/// What a stream waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Turn {
    /// The service, or its body's next frame.
    #[default]
    Ours,
    /// The client: this frame, counted from the response's head, can't go out, or what was before it.
    Client(u64),
}

thread_local! {
    /// Of the stream that is being polled on this thread.
    static TURN: Cell<Turn> = const { Cell::new(Turn::Ours) };
}

/// Spawns a connection's streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams {
    /// A client that takes nothing of a stream for so long loses it.
    pub(super) stall: Duration,
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, stream: F) {
        tokio::spawn(Stream { stream, turn: Turn::Ours, stall: self.stall, timer: None });
    }
}

pin_project! {
    /// One stream. Ready too early it drops what it drives, which resets the stream.
    struct Stream<F> {
        #[pin]
        stream: F,
        turn: Turn,
        stall: Duration,
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for Stream<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        TURN.set(*this.turn);
        let ended = this.stream.poll(cx);
        let before = std::mem::replace(this.turn, TURN.take());
        if ended.is_ready() || *this.turn == Turn::Ours {
            return ended;
        }
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(*this.stall)));
        if *this.turn != before {
            timer.as_mut().reset(Instant::now() + *this.stall);
        }
        timer.as_mut().poll(cx)
    }
}

pin_project! {
    /// A response's body, which says whose turn it is.
    pub(super) struct Told<B> {
        #[pin]
        body: B,
        frames: u64,
    }
}

impl<B> Told<B> {
    /// Now there is a head, and the client is to take it.
    pub(super) fn new(body: B) -> Self {
        TURN.set(Turn::Client(0));
        Self { body, frames: 0 }
    }
}

impl<B: Body> Body for Told<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let frame = this.body.poll_frame(cx);
        TURN.set(match &frame {
            Poll::Pending => Turn::Ours,
            Poll::Ready(_) => {
                *this.frames += 1;
                Turn::Client(*this.frames)
            }
        });
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};

    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    async fn stream(stream: impl Future<Output = ()>) {
        Stream { stream, turn: Turn::Ours, stall: STALL, timer: None }.await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_and_a_body_may_take_as_long_as_they_like() {
        let began = Instant::now();
        stream(async {
            sleep(10 * STALL).await;
            let mut wait = Box::pin(sleep(10 * STALL));
            let mut body =
                Told::new(Scripted(move |cx: &mut Context<'_>| wait.as_mut().poll(cx).map(|()| None)));
            assert!(body.frame().await.is_none());
        })
        .await;
        assert!(began.elapsed() >= 20 * STALL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_ends_it() {
        let began = Instant::now();
        stream(async {
            let _body = Told::new(Full::new(Bytes::from_static(b"never taken")));
            std::future::pending::<()>().await;
        })
        .await;
        assert_eq!(began.elapsed().as_secs(), STALL.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn with_all_that_it_takes_its_time_begins_anew() {
        let began = Instant::now();
        stream(async {
            let some = |_: &mut Context<'_>| Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"some")))));
            let mut body = Told::new(Scripted(some));
            for _ in 0..5 {
                sleep(STALL - Duration::from_secs(1)).await;
                assert!(body.frame().await.is_some());
            }
            std::future::pending::<()>().await;
        })
        .await;
        assert_eq!(began.elapsed().as_secs(), (5 * (STALL - Duration::from_secs(1)) + STALL).as_secs());
    }

    type Item = Option<Result<Frame<Bytes>, std::convert::Infallible>>;

    /// A body of a function.
    struct Scripted<F>(F);

    impl<F: FnMut(&mut Context<'_>) -> Poll<Item> + Unpin> Body for Scripted<F> {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Item> {
            (self.0)(cx)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whose_turn_it_is_belongs_to_one_stream() {
        let other = async {
            let _body = Told::new(Full::new(Bytes::new()));
            let mut once = false;
            poll_fn(|_| if std::mem::replace(&mut once, true) { Poll::Ready(()) } else { Poll::Pending })
                .await;
        };
        let mut other = Box::pin(stream(other));
        let waits = poll_fn(|cx| Poll::Ready(other.as_mut().poll(cx).is_pending())).await;
        assert!(waits);
        assert_eq!(TURN.get(), Turn::Ours);
    }
}
