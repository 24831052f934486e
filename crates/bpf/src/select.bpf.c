/* Selects the listen socket for a connection: the local socket of the CPU that handles the SYN.
 * There is one instance for each listener group (the sockets that share an address).
 *
 * The time is constant, whatever the number of sockets: one lookup of the slot, and one of the
 * socket. The slot of a CPU without a worker points to some worker. If a worker dies, the kernel
 * removes its socket from `sockets`. Until the slots are written again, its connections go to
 * the global listen socket, which all workers serve. When a listen socket is closed with
 * connections in its queue, the kernel asks this program where to migrate them: to the global
 * socket, too.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include "balance.h"
#include "counters.h"

char LICENSE[] SEC("license") = "GPL";

/* Place of the global listen socket in `sockets`. */
#define GLOBAL 0
/* A slot's value: the place of a socket, and whether its worker runs on the
 * slot's own CPU. */
#define PLACE 0xffff
#define OWN 0x80000000

/* Masks are powers of two minus one, set before loading: `cpu_mask` covers all possible CPUs,
 * `sub_mask` the slots of one CPU. */
const volatile __u32 cpu_mask;
const volatile __u32 sub_mask;
const volatile __u32 sub_shift;

/* The global listen socket, and the local one of each worker. The kernel
 * removes a socket that is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/* Slots by CPU, and within a CPU by the connection's hash. If a CPU has several workers, they
 * share its slots. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} slots SEC(".maps");

enum selection {
	/* SYNs for which a socket was selected. */
	LOOKUPS,
	/* ... the socket of a worker of this CPU. */
	SELF,
	/* ... the socket of a worker of another CPU, because this CPU has none. */
	OTHER,
	/* The first choice had died, so the neighbouring slot was used. */
	BESIDE,
	/* No worker: the global listen socket was selected. */
	TO_GLOBAL,
	/* There was no global listen socket, either, so the kernel chose. */
	TO_KERNEL,
	/* Connections and handshakes of a closed socket, which moved. */
	MIGRATED,
	SELECTIONS,
};
COUNTERS(selections, SELECTIONS);

static __always_inline bool from_slot(struct sk_reuseport_md *ctx, __u32 slot, bool first)
{
	__u32 *value = bpf_map_lookup_elem(&slots, &slot);
	__u32 place, is_own;

	if (!value)
		return false;
	place = *value & PLACE;
	is_own = *value & OWN;
	if (place == GLOBAL || bpf_sk_select_reuseport(ctx, &sockets, &place, 0))
		return false;
	added(place);
	if (!first)
		COUNT(selections, BESIDE);
	else if (is_own)
		COUNT(selections, SELF);
	else
		COUNT(selections, OTHER);
	return true;
}

SEC("sk_reuseport/migrate")
int select_listener(struct sk_reuseport_md *ctx)
{
	__u32 place = GLOBAL;

	if (ctx->migrating_sk) {
		COUNT(selections, MIGRATED);
	} else {
		__u32 base = (bpf_get_smp_processor_id() & cpu_mask) << sub_shift;
		__u32 sub = ctx->hash & sub_mask;

		COUNT(selections, LOOKUPS);
		if (from_slot(ctx, base | sub, true) || from_slot(ctx, base | (sub ^ (sub_mask & 1)), false))
			return SK_PASS;
	}
	if (bpf_sk_select_reuseport(ctx, &sockets, &place, 0)) {
		/* No process holds the socket any more. */
		if (!ctx->migrating_sk) {
			COUNT(selections, TO_KERNEL);
			stirred();
		}
		return SK_PASS;
	}
	if (!ctx->migrating_sk)
		COUNT(selections, TO_GLOBAL);
	return SK_PASS;
}
