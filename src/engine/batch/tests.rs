//! The leader and its followers, over jobs that only record what happens to them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, mpsc};
use std::thread;

use std::time::{Duration, Instant};

use super::Demand;
use super::lead::*;
use crate::engine::cancel::Stop;
use crate::error::{Error, ErrorKind, Result, bail};

/// A job's number.
type Numbers = Batcher<usize, usize>;

fn call(job: usize, tokens: usize, decodes: bool, since: u64) -> Call<usize> {
    let demand = Demand { tokens, decodes, priority: 0, since, passed: 0, apart: false };
    Call { job, demand, stop: Stop::default(), leads: true, member: job as u64, returns: false }
}

fn token(job: usize) -> Call<usize> {
    call(job, 1, true, job as u64)
}

/// A closure that never lets anybody wait for room.
impl<J, R, F> Runner<J, R> for F
where
    F: Fn(&mut [(J, usize)], &mut Between<'_>) -> Result<Vec<Result<R>>>,
{
    fn run(&self, jobs: &mut [(J, usize)], between: &mut Between<'_>) -> Result<Vec<Reply<R>>> {
        Ok(self(jobs, between)?.into_iter().map(Reply::Done).collect())
    }
}

/// Ten times the job's number, where nothing goes wrong.
fn tenfold(jobs: &mut [(usize, usize)], _: &mut Between<'_>) -> Result<Vec<Result<usize>>> {
    Ok(jobs.iter().map(|(job, _)| Ok(10 * job)).collect())
}

fn value(outcome: Outcome<usize>) -> Result<usize> {
    outcome.expect("no panic")
}

/// Waits until `count` calls are queued.
fn until_waiting(batcher: &Numbers, count: usize) {
    while batcher.state().waiting.len() < count {
        thread::yield_now();
    }
}

#[test]
fn a_call_alone_is_served_by_its_own_thread() {
    let batcher = Numbers::new(16, 16);
    let own = thread::current().id();
    let run = |jobs: &mut [(usize, usize)], between: &mut Between<'_>| {
        assert_eq!(thread::current().id(), own);
        tenfold(jobs, between)
    };
    let (job, outcome) = batcher.call(token(7), &run);
    assert_eq!((job, value(outcome).unwrap()), (7, 70));
    assert!(!batcher.state().is_led);
}

/// What goes wrong with a step of these jobs.
type Misbehave<'a> = dyn Fn(&[(usize, usize)]) -> Result<()> + Sync + 'a;

/// Holds the first step until `count` more calls wait, and hands out the sizes of the steps.
fn crowd(count: usize, misbehave: &Misbehave<'_>) -> (Vec<Outcome<usize>>, Vec<usize>) {
    let batcher = Numbers::new(64, 64);
    let sizes = Mutex::new(Vec::new());
    let run = |jobs: &mut [(usize, usize)], between: &mut Between<'_>| {
        if jobs[0].0 == 0 {
            until_waiting(&batcher, count);
        }
        sizes.lock().unwrap().push(jobs.len());
        misbehave(jobs)?;
        tenfold(jobs, between)
    };
    let outcomes = thread::scope(|scope| {
        let first = scope.spawn(|| batcher.call(token(0), &run).1);
        while !batcher.state().is_led {
            thread::yield_now();
        }
        let (batcher, run) = (&batcher, &run);
        let others: Vec<_> = (1..=count).map(|i| scope.spawn(move || batcher.call(token(i), run).1)).collect();
        std::iter::once(first).chain(others).map(|handle| handle.join().unwrap()).collect()
    });
    assert!(!batcher.state().is_led, "nobody leads when all are gone");
    assert!(batcher.state().waiting.is_empty());
    (outcomes, sizes.into_inner().unwrap())
}

#[test]
fn calls_that_wait_together_share_a_step() {
    let (outcomes, sizes) = crowd(12, &|_| Ok(()));
    assert_eq!(sizes, [1, 12]);
    let values: Vec<usize> = outcomes.into_iter().map(|o| value(o).unwrap()).collect();
    assert_eq!(values, (0..=12).map(|i| 10 * i).collect::<Vec<_>>());
}

#[test]
fn a_panic_in_a_shared_step_reaches_the_call_that_causes_it_and_no_other() {
    let (outcomes, sizes) = crowd(6, &|jobs| match jobs.iter().any(|job| job.0 == 4) {
        true => panic!("job 4"),
        false => Ok(()),
    });
    assert_eq!(sizes, [1, 6, 1, 1, 1, 1, 1, 1], "each has a step of its own");
    for (i, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(result) => assert_eq!((result.unwrap(), i == 4), (10 * i, false)),
            Err(payload) => assert_eq!((payload.downcast_ref(), i), (Some(&"job 4"), 4)),
        }
    }
}

#[test]
fn an_error_of_a_whole_step_reaches_those_whose_own_step_has_it() {
    let (outcomes, sizes) = crowd(5, &|jobs| match jobs.iter().find(|job| job.0 == 2 || job.0 == 3) {
        Some(job) => Err(Error::new(ErrorKind::Numeric, format!("job {}", job.0))),
        None => Ok(()),
    });
    assert_eq!(sizes, [1, 5, 1, 1, 1, 1, 1]);
    for (i, outcome) in outcomes.into_iter().enumerate() {
        match value(outcome) {
            Ok(result) => assert_eq!(result, 10 * i),
            Err(error) => assert_eq!((error.message(), i == 2 || i == 3), (&*format!("job {i}"), true)),
        }
    }
}

#[test]
fn an_error_of_one_job_is_its_own_and_the_others_keep_their_step() {
    let batcher = Numbers::new(64, 64);
    let run = |jobs: &mut [(usize, usize)], _: &mut Between<'_>| {
        if jobs[0].0 == 0 {
            until_waiting(&batcher, 2);
        }
        let refused = |_: &usize| Error::new(ErrorKind::NoBlocks, "no blocks");
        Ok(jobs.iter().map(|(job, _)| if *job == 2 { Err(refused(job)) } else { Ok(jobs.len()) }).collect())
    };
    let outcomes: Vec<_> = thread::scope(|scope| {
        let run = &run;
        let batcher = &batcher;
        let calls: Vec<_> = (0..3)
            .map(|i| {
                let handle = scope.spawn(move || batcher.call(token(i), run).1);
                while !batcher.state().is_led {
                    thread::yield_now();
                }
                handle
            })
            .collect();
        calls.into_iter().map(|handle| value(handle.join().unwrap())).collect()
    });
    assert_eq!(outcomes[0], Ok(1));
    assert_eq!(outcomes[1], Ok(2), "served together with the call that failed");
    assert_eq!(outcomes[2].as_ref().unwrap_err().kind(), ErrorKind::NoBlocks);
}

#[test]
fn a_waiting_call_that_is_cancelled_returns_after_the_step_at_work_and_the_others_go_on() {
    let batcher = Numbers::new(64, 64);
    let stop = Stop::default();
    let (started, wait_for_start) = mpsc::channel();
    let run = move |jobs: &mut [(usize, usize)], between: &mut Between<'_>| {
        if jobs[0].0 == 0 {
            started.send(()).unwrap();
            thread::sleep(Duration::from_millis(20));
        }
        tenfold(jobs, between)
    };
    thread::scope(|scope| {
        let (batcher, stop) = (&batcher, &stop);
        let first = scope.spawn(move || batcher.call(token(0), &run).1);
        wait_for_start.recv().unwrap();
        let second = scope.spawn(move || batcher.call(Call { stop: stop.clone(), ..token(1) }, &tenfold));
        let third = scope.spawn(move || batcher.call(token(2), &tenfold).1);
        until_waiting(batcher, 2);
        stop.cancel.cancel();
        let (job, outcome) = second.join().unwrap();
        assert_eq!((job, value(outcome).unwrap_err().kind()), (1, ErrorKind::Cancelled));
        assert_eq!(value(third.join().unwrap()), Ok(20));
        assert_eq!(value(first.join().unwrap()), Ok(0));
    });
    assert!(!stop.is_asked(), "the cancel is used up");
}

#[test]
fn a_shared_step_goes_on_until_all_its_calls_are_stopped() {
    let batcher = Numbers::new(64, 64);
    let stops = [Stop::default(), Stop::default()];
    let both = AtomicBool::new(false);
    let run = |jobs: &mut [(usize, usize)], between: &mut Between<'_>| {
        if jobs.len() == 1 {
            until_waiting(&batcher, 2);
            return tenfold(jobs, between);
        }
        stops[0].cancel.cancel();
        between(0)?;
        stops[1].cancel.cancel();
        both.store(between(1).is_err(), Ordering::Relaxed);
        between(1)?;
        tenfold(jobs, between)
    };
    thread::scope(|scope| {
        let (batcher, run, stops) = (&batcher, &run, &stops);
        let first = scope.spawn(move || batcher.call(token(9), run).1);
        while !batcher.state().is_led {
            thread::yield_now();
        }
        let others = [0, 1].map(|i| {
            let call = Call { stop: stops[i].clone(), ..token(i) };
            scope.spawn(move || batcher.call(call, run).1)
        });
        for handle in others {
            assert_eq!(value(handle.join().unwrap()).unwrap_err().kind(), ErrorKind::Cancelled);
        }
        assert_eq!(value(first.join().unwrap()), Ok(90));
    });
    assert!(both.into_inner());
}

#[test]
fn a_thread_that_does_not_lead_is_served_by_others_and_can_be_stopped_while_nobody_leads() {
    let batcher = Numbers::new(64, 64);
    let idle = || Call { leads: false, ..token(1) };
    thread::scope(|scope| {
        let own = thread::current().id();
        let batcher = &batcher;
        let run = move |jobs: &mut [(usize, usize)], between: &mut Between<'_>| {
            assert_eq!(thread::current().id(), own, "the waiting thread does no work");
            tenfold(jobs, between)
        };
        assert!(!batcher.step(&run), "nothing waits yet");
        let waiting = scope.spawn(move || batcher.call(idle(), &run).1);
        until_waiting(batcher, 1);
        assert!(batcher.step(&run));
        assert_eq!(value(waiting.join().unwrap()), Ok(10));

        let deadline = Some(Instant::now() + Duration::from_millis(10));
        let late = Call { stop: Stop { deadline, ..Stop::default() }, ..idle() };
        let waiting = scope.spawn(move || batcher.call(late, &run).1);
        assert_eq!(value(waiting.join().unwrap()).unwrap_err().kind(), ErrorKind::Cancelled);
        assert!(batcher.state().waiting.is_empty());
    });
}

#[test]
fn a_leader_waits_for_those_of_the_last_step_who_are_expected_back() {
    const COUNT: usize = 6;
    const ROUNDS: usize = 30;
    let batcher = Numbers::new(64, 64);
    let (steps, start) = (AtomicUsize::new(0), Barrier::new(COUNT));
    let run = |jobs: &mut [(usize, usize)], between: &mut Between<'_>| {
        steps.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(20));
        tenfold(jobs, between)
    };
    thread::scope(|scope| {
        for i in 0..COUNT {
            let (batcher, run, start) = (&batcher, &run, &start);
            scope.spawn(move || {
                start.wait();
                for _ in 0..ROUNDS {
                    value(batcher.call(Call { returns: true, ..token(i) }, run).1).unwrap();
                }
            });
        }
    });
    let steps = steps.into_inner();
    // two groups that take turns would need twice as many
    assert!(steps <= ROUNDS + ROUNDS / 2, "{steps} steps for {ROUNDS} rounds");
}

/// Room for so many jobs at a time; a job holds its own until it is [freed](Self::free).
struct Rooms {
    free: AtomicUsize,
    tries: AtomicUsize,
    served: Mutex<Vec<usize>>,
}

impl Rooms {
    fn new(free: usize) -> Self {
        Self { free: AtomicUsize::new(free), tries: AtomicUsize::new(0), served: Mutex::default() }
    }
}

impl Runner<usize, usize> for Rooms {
    fn run(&self, jobs: &mut [(usize, usize)], _: &mut Between<'_>) -> Result<Vec<Reply<usize>>> {
        self.tries.fetch_add(1, Ordering::Relaxed);
        let take = |free: usize| free.checked_sub(1);
        let reply = |job: usize| match self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => {
                self.served.lock().unwrap().push(job);
                Reply::Done(Ok(10 * job))
            }
            Err(_) => Reply::Later(1),
        };
        Ok(jobs.iter().map(|(job, _)| reply(*job)).collect())
    }

    fn room(&self) -> u64 {
        self.free.load(Ordering::Relaxed) as u64
    }
}

#[test]
fn a_call_without_room_stays_in_the_queue_until_there_is_some() {
    let (batcher, rooms) = (Numbers::new(64, 64), Rooms::new(0));
    thread::scope(|scope| {
        let (batcher, rooms) = (&batcher, &rooms);
        let first = scope.spawn(move || batcher.call(token(1), rooms).1);
        while rooms.tries.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        let second = scope.spawn(move || batcher.call(token(2), rooms).1);
        let stop = Stop::default();
        let third = {
            let stop = stop.clone();
            scope.spawn(move || batcher.call(Call { stop, ..token(3) }, rooms).1)
        };
        while rooms.tries.load(Ordering::Relaxed) < 5 {
            thread::yield_now();
        }
        assert!(rooms.served.lock().unwrap().is_empty());
        stop.cancel.cancel();
        assert_eq!(value(third.join().unwrap()).unwrap_err().kind(), ErrorKind::Cancelled, "a cancel ends the wait");
        rooms.free.store(2, Ordering::Relaxed);
        assert_eq!((value(first.join().unwrap()), value(second.join().unwrap())), (Ok(10), Ok(20)));
    });
    assert!(!batcher.state().is_led && batcher.state().waiting.is_empty());
}

/// Random crowds of threads: calls of many sizes and priorities, stops, panics and errors. Every call ends, each with what
/// is its own, and no token is done twice or lost.
#[test]
fn random_crowds_lose_nothing_and_strand_nobody() {
    for seed in 0..40_u64 {
        let batcher = Batcher::<VecDeque<usize>, usize>::new(8 + seed as usize % 9, 3 + seed as usize % 5);
        let run = |jobs: &mut [(VecDeque<usize>, usize)], between: &mut Between<'_>| {
            between(0)?;
            match jobs.iter().flat_map(|(job, count)| job.iter().take(*count)).max() {
                Some(n) if n % 97 == 13 => panic!("unlucky"),
                Some(n) if n % 89 == 17 => bail!(Numeric, "not a number"),
                _ => {}
            }
            between(1)?;
            Ok(jobs.iter_mut().map(|(job, count)| Ok((0..*count).map_while(|_| job.pop_front()).count())).collect())
        };
        thread::scope(|scope| {
            for thread in 0..8_usize {
                let (batcher, run) = (&batcher, &run);
                scope.spawn(move || {
                    let mut random = seed.wrapping_mul(1_000_003) + thread as u64;
                    let mut next = move |below: usize| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        (random >> 33) as usize % below
                    };
                    for _ in 0..40 {
                        let mut job: VecDeque<usize> = (0..1 + next(20)).map(|_| next(400)).collect();
                        let stop = Stop::default();
                        if next(10) == 0 {
                            stop.cancel.cancel();
                        }
                        let since = batcher.new_call();
                        while !job.is_empty() {
                            let (tokens, decodes) = (job.len(), job.len() < 3);
                            let priority = next(3) as i32;
                            let demand = Demand { tokens, decodes, priority, since, passed: 0, apart: false };
                            let (member, returns) = (thread as u64, next(2) == 0);
                            let call = Call { job, demand, stop: stop.clone(), leads: true, member, returns };
                            let (back, outcome) = batcher.call(call, run);
                            job = back;
                            match outcome {
                                Ok(Ok(done)) => assert_eq!(job.len(), tokens - done),
                                Ok(Err(e)) if e.kind() == ErrorKind::Cancelled => break,
                                Ok(Err(_)) | Err(_) => {
                                    assert_eq!(job.len(), tokens, "nothing was done");
                                    let bad = |n: &usize| n % 97 == 13 || n % 89 == 17;
                                    assert!(job.iter().any(bad), "the error is its own");
                                    job.retain(|n| !bad(n));
                                }
                            }
                        }
                    }
                });
            }
        });
        assert!(!batcher.state().is_led && batcher.state().waiting.is_empty());
    }
}
