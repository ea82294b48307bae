//! Calls that no thread waits in: each is a future that goes on when its step is done, on a thread that steps for others.
//!
//! The same futures serve calls whose thread waits. In those a step blocks, so they are ready when first asked: [`now`].
//!
//! Order of locks: a task's future before those of the engine; the list, a task's flag and the bell under any of them, each
//! alone.
#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::bell::Bell;

/// What a task does.
pub(crate) type Course = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The tasks of an engine that can go on, and who is told of them.
#[derive(Default)]
pub(crate) struct Agenda {
    ready: Mutex<Vec<Arc<Task>>>,
    bell: Bell,
}

/// A call that no thread waits in.
pub(crate) struct Task {
    agenda: Weak<Agenda>,
    state: Mutex<State>,
    /// Whether it can go on.
    is_woken: Mutex<bool>,
    woken: Condvar,
}

enum State {
    Running(Course),
    Over,
    /// It panicked; until somebody asks, with what.
    Broken(Option<Box<dyn Any + Send>>),
}

impl Agenda {
    /// Has all tasks go on that can; whether there were any.
    pub(crate) fn advance(&self) -> bool {
        let ready = std::mem::take(&mut *lock(&self.ready));
        ready.iter().for_each(|task| {
            task.advance();
        });
        !ready.is_empty()
    }

    /// Told whenever there is something to do.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }
}

impl Task {
    /// A task of `agenda` that begins when it is first woken.
    pub(crate) fn new(agenda: &Arc<Agenda>, course: Course) -> Arc<Self> {
        Arc::new(Self {
            agenda: Arc::downgrade(agenda),
            state: Mutex::new(State::Running(course)),
            is_woken: Mutex::new(false),
            woken: Condvar::new(),
        })
    }

    /// Goes on until the next step; whether it is over.
    pub(crate) fn advance(self: &Arc<Self>) -> bool {
        let mut state = lock(&self.state);
        let State::Running(course) = &mut *state else { return true };
        *lock(&self.is_woken) = false;
        let waker = Waker::from(Arc::clone(self));
        let polled = catch_unwind(AssertUnwindSafe(|| course.as_mut().poll(&mut Context::from_waker(&waker))));
        let next = match polled {
            Ok(Poll::Pending) => return false,
            Ok(Poll::Ready(())) => State::Over,
            Err(payload) => State::Broken(Some(payload)),
        };
        // what it had ends here, and not under the next one's lock
        let course = std::mem::replace(&mut *state, next);
        drop(state);
        drop(course);
        *lock(&self.is_woken) = true;
        self.woken.notify_all();
        true
    }

    /// Whether it is over.
    pub(crate) fn is_over(&self) -> bool {
        !matches!(*lock(&self.state), State::Running(_))
    }

    /// What it panicked with, once.
    pub(crate) fn take_panic(&self) -> Option<Box<dyn Any + Send>> {
        match &mut *lock(&self.state) {
            State::Broken(payload) => payload.take(),
            State::Running(_) | State::Over => None,
        }
    }

    /// Waits until it can go on or is over, for `limit` at most.
    pub(crate) fn wait(&self, limit: Duration) {
        let is_woken = lock(&self.is_woken);
        if !*is_woken {
            drop(self.woken.wait_timeout(is_woken, limit));
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        *lock(&self.is_woken) = true;
        self.woken.notify_all();
        if let Some(agenda) = self.agenda.upgrade() {
            lock(&agenda.ready).push(self);
            agenda.bell.ring();
        }
    }
}

/// The value of a call whose thread waits.
pub(crate) fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("a step blocks, unless the call was submitted"),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn begin(agenda: &Arc<Agenda>, course: Course) -> Arc<Task> {
        let task = Task::new(agenda, course);
        Arc::clone(&task).wake();
        task
    }

    #[test]
    fn a_task_goes_on_when_it_is_woken_and_only_then() {
        let (agenda, count, waker) =
            (Arc::<Agenda>::default(), Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(None)));
        let (inside, kept) = (Arc::clone(&count), Arc::clone(&waker));
        let task = begin(
            &agenda,
            Box::pin(std::future::poll_fn(move |context| {
                *lock(&kept) = Some(context.waker().clone());
                if inside.fetch_add(1, Ordering::Relaxed) == 2 { Poll::Ready(()) } else { Poll::Pending }
            })),
        );
        assert!(agenda.advance() && !agenda.advance(), "it begins, and waits");
        for over in [false, true] {
            lock(&waker).take().expect("it was asked").wake();
            assert!(agenda.advance() && !agenda.advance());
            assert_eq!(task.is_over(), over);
        }
        assert!(task.advance(), "it stays over");
        assert_eq!(count.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_panic_ends_its_task_and_no_other() {
        let agenda = Arc::<Agenda>::default();
        let tasks = [true, false].map(|panics| begin(&agenda, Box::pin(async move { assert!(!panics, "in a task") })));
        assert!(agenda.advance());
        assert!(tasks.iter().all(|task| task.is_over()));
        let text = |task: &Task| task.take_panic().map(|payload| payload.downcast_ref::<&str>().copied());
        assert_eq!([text(&tasks[0]), text(&tasks[0]), text(&tasks[1])], [Some(Some("in a task")), None, None]);
    }

    #[test]
    fn a_task_that_was_given_up_is_no_leak() {
        let (agenda, held) = (Arc::<Agenda>::default(), Arc::new(()));
        let inside = Arc::clone(&held);
        let task = begin(
            &agenda,
            Box::pin(async move {
                std::future::pending::<()>().await;
                drop(inside);
            }),
        );
        agenda.advance();
        drop((task, agenda));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
