/* Counters of a program: one per-CPU array with one key for each reason. The keys are those of
 * an enum in the same file; the Rust side repeats it as a list of names. */
#ifndef FSOCKET_COUNTERS_H
#define FSOCKET_COUNTERS_H

#define COUNTERS(map, n)                                                                                     \
	struct {                                                                                             \
		__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);                                                     \
		__uint(max_entries, n);                                                                      \
		__type(key, __u32);                                                                          \
		__type(value, __u64);                                                                        \
	} map SEC(".maps")

/* Atomic, because a program in process context can be preempted between lookup and addition.
 * This costs little, because the cache line belongs to this CPU. */
#define COUNT(map, reason)                                                                                   \
	do {                                                                                                 \
		__u32 key_ = (reason);                                                                       \
		__u64 *value_ = bpf_map_lookup_elem(&map, &key_);                                            \
		if (value_)                                                                                  \
			__sync_fetch_and_add(value_, 1);                                                     \
	} while (0)

#endif
