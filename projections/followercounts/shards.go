package followercounts

import (
	"hash/fnv"
	"io"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

const (
	// splitAt is the number of incoming edges from which an object's edges are spread over two
	// shards. Each doubling of that number doubles the shards, up to maxShards.
	// docs/adr/0005-shards-of-the-celebrated.md has the measurements.
	splitAt   = 100_000
	maxShards = 64 // the CHECK of edge_shards has the same number
)

// shardHash is a fixed hash of an origin, below maxShards. Modulo the number of a target's shards
// (a power of two) it is the shard of a new edge. It is FNV-1a and the finalizer of SplitMix64,
// whose lowest bits depend on all bits of its input.
func shardHash(from event.ID) int32 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, string(from))
	z := h.Sum64()
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return int32((z ^ z>>31) % maxShards)
}

// splitSQL raises the number of shards of counted objects (objects whose incoming edges the batch
// changed) that exceed a threshold. All events of a target are in one partition, whose offset the
// caller has locked, so no other transaction raises them at the same time.
const splitSQL = `
INSERT /* followercounts.split */ INTO edge_shards AS s (tenant_id, kind, object_id, shards)
SELECT c.tenant_id, @kind, c.object_id, want.shards
  FROM counted c
 CROSS JOIN LATERAL (SELECT max(r.shards) AS shards
                       FROM unnest(@thresholds::bigint[], @shards::smallint[]) AS r(threshold, shards)
                      WHERE c.incoming >= r.threshold) want
  LEFT JOIN edge_shards have ON have.tenant_id = c.tenant_id AND have.kind = @kind AND have.object_id = c.object_id
 WHERE c.incoming >= @split_at AND coalesce(have.shards, 1) < want.shards
    ON CONFLICT (tenant_id, kind, object_id) DO UPDATE SET shards = excluded.shards`

// splitArgs adds splitSQL's arguments to args.
func (p Projection) splitArgs(args postgres.Args) postgres.Args {
	var thresholds []int64
	var shards []int16
	for n, at := int16(2), p.splitAt; n <= maxShards; n, at = n*2, at*2 {
		thresholds, shards = append(thresholds, at), append(shards, n)
	}
	args["thresholds"], args["shards"], args["split_at"] = thresholds, shards, p.splitAt
	return args
}
