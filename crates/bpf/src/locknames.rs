//! Names of locks, found by the functions that take them. Most locks are in allocated memory and
//! have no symbol. The names are those of the Fastsocket paper (table 1) if it has one, else the
//! kernel's own.

/// Functions of the locking code itself, between the lock and its user.
const MACHINERY: &[&str] = &[
    "native_queued_spin_lock_slowpath",
    "__pv_queued_spin_lock_slowpath",
    "queued_spin_lock_slowpath",
    "queued_read_lock_slowpath",
    "queued_write_lock_slowpath",
    "do_raw_spin_lock",
    "lock_acquire",
    "mutex_lock",
    "mutex_lock_interruptible",
    "mutex_lock_killable",
    "mutex_lock_nested",
    "mutex_lock_io",
    "osq_lock",
    "down_read",
    "down_read_interruptible",
    "down_read_killable",
    "down_write",
    "down_write_killable",
    "down_write_nested",
    "rwsem_down_read_slowpath",
    "rwsem_down_write_slowpath",
    "percpu_rwsem_wait",
    "lockref_get",
    "lockref_put_or_lock",
    "lockref_get_not_dead",
    "lockref_put_return",
    "lockref_mark_dead",
];
/// Prefixes of such functions.
const MACHINERY_PREFIX: &[&str] = &[
    "_raw_spin_lock",
    "_raw_read_lock",
    "_raw_write_lock",
    "__raw_spin_lock",
    "__raw_callee_save___pv_",
    "__mutex_lock",
    "__down_read",
    "__down_write",
    "__percpu_down",
    "rt_mutex_",
    "rt_spin_",
    "__rt_mutex_",
    "rtlock_",
    "trace_contention_",
    "__traceiter_contention_",
    "__bpf_trace_contention_",
    "bpf_trace_run",
    "bpf_get_stackid",
    "bpf_prog_",
    "bpf_dispatcher_",
    "__x86_indirect_",
];

/// Which lock a function with this name takes: class of the lock, functions, name of the lock.
const LOCKS: &[(&str, &[&str], &str)] = &[
    (
        "spinlock",
        &[
            "lock_sock_nested",
            "__lock_sock",
            "__lock_sock_fast",
            "lock_sock_fast",
            "release_sock",
            "__release_sock",
            "tcp_v4_rcv",
            "tcp_v6_rcv",
            "tcp_write_timer",
            "tcp_delack_timer",
            "tcp_keepalive_timer",
            "tcp_tsq_handler",
            "tcp_tasklet_func",
            "tcp_tsq_workfn",
            "tcp_close",
            "__tcp_close",
            "tcp_check_req",
            "tcp_child_process",
            "tcp_v4_err",
            "sk_clone_lock",
            "inet_csk_accept",
            "inet_csk_complete_hashdance",
            "inet_csk_listen_stop",
        ],
        "slock",
    ),
    ("spinlock", &["inet_csk_reqsk_queue_add", "reqsk_queue_remove"], "rskq_lock"),
    (
        "*",
        &["ep_poll_callback", "ep_poll", "ep_start_scan", "ep_done_scan", "ep_insert", "ep_remove", "ep_modify"],
        "ep.lock",
    ),
    ("mutex", &["do_epoll_ctl", "ep_send_events", "ep_eventpoll_poll", "__ep_eventpoll_poll", "ep_free"], "ep.mtx"),
    (
        "spinlock",
        &[
            "lock_timer_base",
            "__mod_timer",
            "mod_timer",
            "add_timer_on",
            "__timer_delete",
            "timer_delete",
            "__run_timers",
            "run_timer_base",
            "__run_timer_base",
            "get_next_timer_interrupt",
            "__get_next_timer_interrupt",
        ],
        "base.lock",
    ),
    (
        "spinlock",
        &[
            "inet_ehash_insert",
            "inet_ehash_nolisten",
            "inet_unhash",
            "__inet_check_established",
            "__inet6_check_established",
            "reqsk_queue_unlink",
            "inet_twsk_kill",
            "inet_twsk_hashdance_schedule",
        ],
        "ehash.lock",
    ),
    (
        "spinlock",
        &[
            "__inet_hash_connect",
            "inet_csk_get_port",
            "inet_put_port",
            "__inet_put_port",
            "__inet_inherit_port",
            "inet_twsk_bind_unhash",
            "inet_bhash2_update_saddr",
        ],
        "bhash.lock",
    ),
    ("spinlock", &["__inet_hash", "inet_hash"], "listening hash"),
    (
        "spinlock",
        &["d_alloc", "d_alloc_pseudo", "d_instantiate", "dput", "d_delete", "d_lookup", "shrink_dentry_list"],
        "dcache_lock",
    ),
    (
        "spinlock",
        &["new_inode", "new_inode_pseudo", "inode_sb_list_add", "evict", "iput", "alloc_inode", "ifind", "iget_locked"],
        "inode_lock",
    ),
    (
        "spinlock",
        &["raw_spin_rq_lock_nested", "try_to_wake_up", "__schedule", "task_rq_lock", "sched_balance_rq"],
        "rq.lock",
    ),
    ("spinlock", &["__dev_queue_xmit", "__dev_xmit_skb", "sch_direct_xmit", "net_tx_action"], "qdisc lock"),
    ("spinlock", &["rmqueue_bulk", "free_pcppages_bulk", "free_one_page", "rmqueue", "__rmqueue_pcplist"], "zone.lock"),
    ("spinlock", &["get_partial_node", "__slab_free", "get_partial", "__unfreeze_partials"], "slab list_lock"),
    (
        "spinlock",
        &[
            "__wake_up_common_lock",
            "prepare_to_wait",
            "prepare_to_wait_exclusive",
            "finish_wait",
            "__wake_up_sync_key",
            "remove_wait_queue",
            "add_wait_queue",
        ],
        "wait queue",
    ),
    ("spinlock", &["futex_wake", "futex_wait_setup", "futex_q_lock", "futex_requeue"], "futex bucket"),
    ("spinlock", &["alloc_fd", "close_fd", "file_close_fd", "fd_install", "put_unused_fd"], "files.lock"),
    (
        "rwsem",
        &[
            "do_user_addr_fault",
            "lock_mm_and_find_vma",
            "vm_mmap_pgoff",
            "__vm_munmap",
            "__do_sys_brk",
            "do_mprotect_pkey",
            "do_madvise",
            "madvise_lock",
            "dup_mmap",
            "exit_mmap",
        ],
        "mmap_lock",
    ),
    ("spinlock", &["__pte_offset_map_lock", "pmd_lock", "__pmd_alloc", "__pte_alloc"], "page table lock"),
    ("mutex", &["rtnl_lock", "rtnetlink_rcv_msg", "rtnl_lock_killable"], "rtnl"),
    ("mutex", &["pipe_read", "pipe_write", "anon_pipe_read", "anon_pipe_write"], "pipe.mutex"),
];

fn is_machinery(function: &str) -> bool {
    MACHINERY.contains(&function) || MACHINERY_PREFIX.iter().any(|prefix| function.starts_with(prefix))
}

/// The function that wants the lock: the innermost one that does not itself belong to the locking
/// code.
pub(crate) fn caller<'a>(frames: &[&'a str]) -> Option<&'a str> {
    frames.iter().find(|f| !is_machinery(f)).copied()
}

/// The name of the lock, by the innermost functions that want it. Its caller is checked as well,
/// because the function that takes the lock may have been inlined.
pub(crate) fn lock(frames: &[&str], class: &str) -> Option<&'static str> {
    // A sleeping lock protects its list of waiters by a spinlock.
    if class == "spinlock" {
        let sleeping =
            [("rwsem", "rwsem.wait_lock"), ("__mutex", "mutex.wait_lock"), ("rt_mutex", "rt_mutex.wait_lock")];
        let inner = frames.iter().take_while(|f| is_machinery(f) || f.starts_with("rwsem_"));
        if let Some((_, lock)) = inner.flat_map(|f| sleeping.iter().find(|(prefix, _)| f.starts_with(prefix))).next() {
            return Some(lock);
        }
    }
    frames.iter().filter(|f| !is_machinery(f)).take(2).find_map(|function| {
        let known = |(of, functions, _): &&(&str, &[&str], &str)| {
            (*of == "*" && class != "mutex" || *of == class) && functions.contains(function)
        };
        LOCKS.iter().find(known).map(|(_, _, lock)| *lock)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_in_the_paper() {
        let stack = ["__pv_queued_spin_lock_slowpath", "_raw_spin_lock_bh", "lock_sock_nested", "tcp_recvmsg"];
        assert_eq!((caller(&stack), lock(&stack, "spinlock")), (Some("lock_sock_nested"), Some("slock")));
        let stack =
            ["bpf_prog_1234_begin", "bpf_trace_run2", "_raw_spin_lock_irqsave", "ep_poll_callback", "__wake_up"];
        assert_eq!((caller(&stack), lock(&stack, "spinlock")), (Some("ep_poll_callback"), Some("ep.lock")));
        assert_eq!(lock(&["mutex_lock", "do_epoll_ctl"], "mutex"), Some("ep.mtx"));
        assert_eq!(lock(&["_raw_spin_lock", "somewhere"], "spinlock"), None);
        assert_eq!(caller(&["_raw_spin_lock"]), None);
    }
}
