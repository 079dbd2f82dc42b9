package settings

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"strconv"
	"strings"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// OpenExport returns the export of a client, from a position on.
type OpenExport func(plural, cursor, after string, opts ...client.Option) Export

func (o OpenExport) isNone() bool { return o == nil }

// Export is a *client.Export. Only the option Bootstrap makes one, and the linker sees that: a
// program without the option does not link the HTTP client.
type Export interface {
	All(context.Context) iter.Seq2[client.ExportState, error]
	Head() client.ExportHead
}

// StateEvent returns an exported state as an event.
func StateEvent(tenant int64, s client.ExportState) (e event.Event, err error) {
	name := strings.Split(s.Type, ".") // tidings.KIND.EVENT.vN
	if len(name) != 4 {
		return e, fmt.Errorf("the export has a state of type %.80q", s.Type)
	}
	version, err := strconv.Atoi(strings.TrimPrefix(name[3], "v"))
	if err != nil {
		return e, fmt.Errorf("the export has a state of type %.80q", s.Type)
	}
	return event.Event{TenantID: tenant, AggregateType: name[1], AggregateID: event.ID(s.Subject), Type: name[2], Version: version,
		Payload: s.Data}, nil
}

// IsRefused reports an answer of the API that no retry changes.
func IsRefused(err error) bool {
	p, ok := errors.AsType[*client.Problem](err)
	return ok && p.Status >= 400 && p.Status < 500 && p.Status != 408 && p.Status != 429 && p.Code != client.CodeExportOutdated
}

// Covered returns the sequence up to which all exports cover a partition's stream.
func Covered(exports [][]client.ExportPosition, partition int) uint64 {
	at := uint64(math.MaxUint64)
	for _, positions := range exports {
		at = min(at, covered(positions, partition))
	}
	return at
}

// covered is Covered for one export. An unlisted stream with a lower number than a listed one is
// covered; an unlisted newer stream is not.
func covered(positions []client.ExportPosition, partition int) uint64 {
	newest := -1
	for _, p := range positions {
		if p.Partition == partition {
			return p.Sequence
		}
		newest = max(newest, p.Partition)
	}
	if partition < newest {
		return math.MaxUint64
	}
	return 0
}

// PluralOf returns the name of a kind in the path of its export; "" if it has none.
func PluralOf(all *kinds.Set, kind string) string {
	if k, ok := all.Edge(kind); ok {
		return k.Plural
	}
	if k, ok := all.Child(kind); ok {
		return k.Plural
	}
	if kind == event.AggregateThread {
		return "threads"
	}
	return ""
}
