//! The leader and its followers once more, from the same source, over locks and threads that a scheduler interleaves: some
//! hundreds of orders, `DSV4_SCHEDULES` of them. Time does not pass: a wait with a limit ends at once. A thread that nobody
//! wakes is a deadlock, which the scheduler reports with the order that led there.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use shuttle::thread;

use super::{compose, pace};
use crate::engine::cancel::Stop;
use crate::error::{Error, ErrorKind, Result};
use compose::Demand;
use lead::{Batcher, Between, Call, Reply, Runner};
use sync::Monitor;

#[path = "lead.rs"]
#[expect(clippy::duplicate_mod, reason = "the very source is what is tried here, over other locks")]
#[expect(dead_code, reason = "the engine uses all of it, these tests a part")]
mod lead;

mod sync {
    use std::sync::PoisonError;
    use std::time::Duration;

    use shuttle::sync::{Condvar, Mutex, MutexGuard};

    pub(super) struct Monitor<T> {
        value: Mutex<T>,
        changed: Condvar,
    }

    pub(super) type Guard<'a, T> = MutexGuard<'a, T>;

    impl<T> Monitor<T> {
        pub(super) fn new(value: T) -> Self {
            Self { value: Mutex::new(value), changed: Condvar::new() }
        }

        pub(super) fn lock(&self) -> Guard<'_, T> {
            self.value.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(super) fn wait<'a>(&'a self, guard: Guard<'a, T>) -> Guard<'a, T> {
            self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }

        pub(super) fn wait_for<'a>(&'a self, guard: Guard<'a, T>, _: Duration) -> Guard<'a, T> {
            drop(guard);
            shuttle::thread::yield_now();
            self.lock()
        }

        pub(super) fn tell(&self) {
            self.changed.notify_one();
        }
    }

    pub(super) fn attend(_: Duration, goes_on: impl Fn() -> bool) {
        if goes_on() {
            shuttle::thread::yield_now();
        }
    }
}

/// Ten times the job's number; steps of several jobs fail if one of them is odd, and so do odd jobs alone.
struct Host {
    bell: Monitor<bool>,
}

impl Runner<usize, usize> for Host {
    fn run(&self, jobs: &mut [(usize, usize)], between: &mut Between<'_>) -> Result<Vec<Reply<usize>>> {
        thread::yield_now();
        between(0)?;
        match !jobs.iter().all(|(job, _)| job.is_multiple_of(2)) {
            true => Err(Error::new(ErrorKind::Numeric, "an odd job")),
            false => Ok(jobs.iter().map(|(job, _)| Reply::Done(Ok(10 * job))).collect()),
        }
    }

    fn unattended(&self) {
        self.ring();
    }
}

impl Wake for Host {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

impl Host {
    fn ring(&self) {
        *self.bell.lock() = true;
        self.bell.tell();
    }

    fn wait(&self) {
        let mut is_rung = self.bell.lock();
        while !*is_rung {
            is_rung = self.bell.wait(is_rung);
        }
        *is_rung = false;
    }
}

fn call(job: usize, member: u64, stop: Stop) -> Call<usize> {
    let (tokens, since) = (1, job as u64);
    let demand = Demand { tokens, decodes: true, priority: 0, since, passed: 0, apart: false };
    Call { job, demand, stop, leads: true, member, returns: !job.is_multiple_of(3) }
}

fn check(job: usize, result: &Result<usize>) {
    match result {
        Ok(value) => assert!(job.is_multiple_of(2) && *value == 10 * job),
        Err(error) => assert!(!job.is_multiple_of(2) && error.kind() == ErrorKind::Numeric, "{job}: {error}"),
    }
}

/// Two calls of a thread that waits in them.
fn followers(batcher: &Arc<Batcher<usize, usize>>, host: &Arc<Host>, member: usize) -> thread::JoinHandle<()> {
    let (batcher, host) = (Arc::clone(batcher), Arc::clone(host));
    thread::spawn(move || {
        for job in [4 * member, 4 * member + member % 2] {
            let (back, outcome) = batcher.call(call(job, member as u64, Stop::default()), &*host);
            assert_eq!(back, job);
            check(job, &outcome.expect("no panic"));
        }
    })
}

fn in_many_orders(program: impl Fn(&Arc<Batcher<usize, usize>>, &Arc<Host>) + Send + Sync + 'static) {
    let orders = std::env::var("DSV4_SCHEDULES").map_or(300, |n| n.parse().expect("DSV4_SCHEDULES is a number"));
    shuttle::check_random(
        move || {
            let (batcher, host) = (Arc::new(Batcher::new(8, 2)), Arc::new(Host { bell: Monitor::new(false) }));
            program(&batcher, &host);
            let state = batcher.state();
            assert!(!state.is_led && state.waiting.is_empty(), "nobody leads when all are gone");
        },
        orders,
    );
}

#[test]
fn in_every_order_each_call_is_served_and_nobody_is_stranded() {
    in_many_orders(|batcher, host| {
        let threads: Vec<_> = (1..=3).map(|member| followers(batcher, host, member)).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("its calls are served"));
    });
}

#[test]
fn in_every_order_a_loop_is_woken_for_submitted_calls_until_all_are_served() {
    in_many_orders(|batcher, host| {
        let threads: Vec<_> = (1..=2).map(|member| followers(batcher, host, member)).collect();
        let mut tickets: Vec<_> =
            [100, 101, 102].map(|job| (job, batcher.submit(call(job, job as u64, Stop::default()), &**host))).into();
        let waker = Waker::from(Arc::clone(host));
        loop {
            tickets.retain_mut(|(job, ticket)| {
                match std::pin::Pin::new(ticket).poll(&mut Context::from_waker(&waker)) {
                    Poll::Pending => true,
                    Poll::Ready((_, outcome)) => {
                        check(*job, &outcome.expect("no panic"));
                        false
                    }
                }
            });
            if tickets.is_empty() {
                break;
            }
            host.wait();
            batcher.step(&**host);
        }
        threads.into_iter().for_each(|thread| thread.join().expect("its calls are served"));
    });
}

#[test]
fn in_every_order_a_cancelled_call_ends_and_the_others_go_on() {
    in_many_orders(|batcher, host| {
        let stop = Stop::default();
        let stopped = {
            let (batcher, host, stop) = (Arc::clone(batcher), Arc::clone(host), stop.clone());
            thread::spawn(move || match batcher.call(call(50, 50, stop), &*host).1.expect("no panic") {
                Ok(value) => assert_eq!(value, 500),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled),
            })
        };
        let threads: Vec<_> = (1..=2).map(|member| followers(batcher, host, member)).collect();
        stop.cancel.cancel();
        batcher.dismiss();
        threads.into_iter().chain([stopped]).for_each(|thread| thread.join().expect("its calls end"));
    });
}
