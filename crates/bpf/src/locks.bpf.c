/* Contention of the kernel's locks, by the functions that take them: the live equivalent of the
 * paper's table 1. The tracepoints are those around waiting for a lock. The kernel does not
 * trace a waiter that gets a spinlock by its pending bit. So a spinlock with two contenders
 * shows less contention than it has. (Under a hypervisor all waits are traced.)
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "counters.h"

char LICENSE[] SEC("license") = "GPL";

#define DEPTH 16

/* A wait is identified by lock and thread: a thread that waits for a mutex can be interrupted,
 * and then wait for a spinlock. */
struct waiter {
	__u64 lock;
	__u32 tid;
	/* 1 + CPU for an idle task, because all idle tasks have thread number 0. */
	__u32 idle;
};

struct wait {
	__u64 since;
	__s32 stack;
	/* LCB_F_*: the kind of wait. */
	__u32 flags;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct waiter);
	__type(value, struct wait);
} waits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 8192);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, DEPTH * sizeof(__u64));
} stacks SEC(".maps");

struct site {
	__s32 stack;
	__u32 flags;
};

struct total {
	__u64 times;
	__u64 ns;
	__u64 longest;
	/* One of the locks with this name: its address names a lock that is a variable. */
	__u64 lock;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct site);
	__type(value, struct total);
} sites SEC(".maps");

enum reason {
	/* Waits that were counted. */
	COUNTED,
	/* More waiters at once than `waits` holds. */
	NO_WAIT,
	/* The wait began before the measurement. */
	NO_BEGIN,
	/* There was no room for the stack, or the kernel could not walk it. */
	NO_STACK,
	/* `sites` is full. */
	NO_SITE,
	REASONS,
};
COUNTERS(reasons, REASONS);

static __always_inline struct waiter waiter(void *lock)
{
	struct waiter waiter = { .lock = (__u64)lock, .tid = (__u32)bpf_get_current_pid_tgid() };

	if (!waiter.tid)
		waiter.idle = bpf_get_smp_processor_id() + 1;
	return waiter;
}

SEC("tp_btf/contention_begin")
int BPF_PROG(begin, void *lock, unsigned int flags)
{
	struct waiter who = waiter(lock);
	struct wait wait = { .flags = flags };

	/* A mutex reports the beginning twice: the second time when the thread stops spinning. */
	if (bpf_map_lookup_elem(&waits, &who))
		return 0;
	wait.stack = bpf_get_stackid(ctx, &stacks, BPF_F_FAST_STACK_CMP);
	if (wait.stack < 0) {
		COUNT(reasons, NO_STACK);
		wait.stack = -1;
	}
	wait.since = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&waits, &who, &wait, BPF_ANY))
		COUNT(reasons, NO_WAIT);
	return 0;
}

SEC("tp_btf/contention_end")
int BPF_PROG(end, void *lock, int result)
{
	struct waiter who = waiter(lock);
	struct wait *wait = bpf_map_lookup_elem(&waits, &who);
	struct total *total, none = {};
	struct site site;
	__u64 ns;

	if (!wait) {
		COUNT(reasons, NO_BEGIN);
		return 0;
	}
	ns = bpf_ktime_get_ns() - wait->since;
	site.stack = wait->stack;
	site.flags = wait->flags;
	bpf_map_delete_elem(&waits, &who);

	total = bpf_map_lookup_elem(&sites, &site);
	if (!total) {
		none.lock = (__u64)lock;
		bpf_map_update_elem(&sites, &site, &none, BPF_NOEXIST);
		total = bpf_map_lookup_elem(&sites, &site);
		if (!total) {
			COUNT(reasons, NO_SITE);
			return 0;
		}
	}
	COUNT(reasons, COUNTED);
	__sync_fetch_and_add(&total->times, 1);
	__sync_fetch_and_add(&total->ns, ns);
	/* A race may keep a shorter wait; that does not matter, because these values are not
	 * added up. */
	if (ns > total->longest)
		total->longest = ns;
	return 0;
}
