/* The balance of a listener group. `crates/abi/src/balance.rs` describes each field, and asserts
 * the layout that is repeated here. */
#ifndef FSOCKET_BALANCE_H
#define FSOCKET_BALANCE_H

#define QUEUES 64

struct queue {
	__u64 added;
	__u32 average;
	__u32 pad0[13];
	__u64 taken;
	__u64 looked;
	__u64 pad1[6];
	__u64 drift;
	__u64 pad2[7];
};

struct balance {
	__u64 busy;
	__u64 gone;
	__u32 idle;
	__u32 limit;
	__u32 high;
	__u32 low;
	__u32 ratio;
	__u32 patience;
	__u64 overloaded;
	__u32 pad[4];
	struct queue queue[QUEUES];
	__u32 stolen[QUEUES][QUEUES];
};

_Static_assert(sizeof(struct balance) == 64 + 64 * 192 + 64 * 64 * 4, "as in crates/abi/src/balance.rs");

/* One value, mapped by the monitor and by the workers. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct balance);
} balances SEC(".maps");

/* Wakes the monitor if a queue has become busy, or at the first connection after a quiet time.
 * The contents of a record do not matter. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} waker SEC(".maps");

static __always_inline void ring_waker(void)
{
	__u32 nothing = 0;

	bpf_ringbuf_output(&waker, &nothing, sizeof(nothing), BPF_RB_FORCE_WAKEUP);
}

/* The kernel has chosen among the program's own sockets. If the monitor does not watch at the
 * moment, this wakes the monitor, which then looks at the workers. */
static __always_inline void stirred(void)
{
	__u32 zero = 0;
	struct balance *b = bpf_map_lookup_elem(&balances, &zero);

	if (b && b->idle && __sync_val_compare_and_swap(&b->idle, 1, 0) == 1)
		ring_waker();
}

/* A connection was directed to the queue at this place. (Affinity-Accept, 3.3.1: the average
 * moves with each addition, alpha = 1 / (2 * limit).) */
static __always_inline void added(__u32 place)
{
	__u32 zero = 0, index = place - 1, limit, average, now;
	struct balance *b = bpf_map_lookup_elem(&balances, &zero);
	struct queue *q;
	__u64 n, bit;

	if (!b || index >= QUEUES)
		return;
	limit = b->limit;
	if (!limit)
		return;
	q = &b->queue[index];
	n = __sync_fetch_and_add(&q->added, 1) + 1 - q->taken - q->drift;
	/* Negative if handshakes that were counted as lost have completed after all. */
	if ((__s64)n < 0)
		n = 0;
	if (n > 0x7fff)
		n = 0x7fff;
	now = (__u32)n << 16;
	average = q->average;
	if (now > average)
		average += (now - average) / (2 * limit);
	else
		average -= (average - now) / (2 * limit);
	q->average = average;
	bit = 1ULL << index;
	if (n > b->high) {
		if (!(b->busy & bit) && !(__sync_fetch_and_or(&b->busy, bit) & bit))
			ring_waker();
	} else if ((b->busy & bit) && average < b->low) {
		__sync_fetch_and_and(&b->busy, ~bit);
	}
	/* The monitor does the reverse: it sets idle, and then reads the counts once more. The
	 * addition above is a full barrier. */
	if (b->idle && __sync_val_compare_and_swap(&b->idle, 1, 0) == 1)
		ring_waker();
}

#endif
