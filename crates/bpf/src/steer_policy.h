/* For a policy of one's own: an object with one XDP program that ends in
 * steer_to(). An example is policies/by_address.bpf.c; docs/network.md says how
 * it is built and used.
 *
 * The program runs for every whole TCP packet, after it was parsed and
 * classified, in the place of the built-in policies. It may have maps of its
 * own. STEER_ABI changes when an older object would misread what it is given.
 */
#ifndef FSOCKET_STEER_POLICY_H
#define FSOCKET_STEER_POLICY_H

#include "counters.h"
#include "steer.h"

#define STEER_ABI 1

/* The loader refuses an object whose number is not its own: the number of
 * entries of this map. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_ABI);
	__type(key, __u32);
	__type(value, __u32);
} steer_abi SEC(".maps");

static __always_inline struct steer_packet *steer_packet(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&packets, &zero);
}

#endif
