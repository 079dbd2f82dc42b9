package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/upstreams"
)

// undeclared finds subscribers whose events nobody declares, for example because their program has
// another file of the upstream. A subscriber cannot know that itself: NATS has no declarations.
func undeclared(ctx context.Context, truth *pgxpool.Pool, prefix string, external []broker.Durable) (all []Finding, err error) {
	var set *kinds.Set
	if err := postgres.InTx(ctx, truth, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		set, err = catalog.InForce(ctx, tx)
		return err
	}); err != nil {
		return nil, err
	}
	listed, err := declared.List(ctx, truth)
	if err != nil {
		return nil, err
	}
	for _, d := range external {
		aggregateType, eventType, one := typeOf(d.Filter, prefix)
		if !one || upstreams.Reserved(set, aggregateType) ||
			slices.ContainsFunc(all, func(f Finding) bool { return f.Where == d.Name }) { // on another stream
			continue
		}
		lacks := "there is no kind or upstream " + aggregateType
		if i := slices.IndexFunc(listed, func(u upstreams.Upstream) bool { return u.Name == aggregateType }); i >= 0 {
			if _, is := listed[i].Events[eventType]; is || eventType == "*" || eventType == ">" {
				continue
			}
			lacks = fmt.Sprintf("the upstream %s has no event type %s", aggregateType, eventType)
		}
		all = append(all, finding("subscriber-undeclared", d.Name, "it waits for events that no service may write: "+lacks,
			"tidings upstream add "+aggregateType+", or correct the type in the subscriber"))
	}
	return all, nil
}

// typeOf returns the event type of a filter such as events.*.t1.order.paid, whose event may be a
// wildcard. one is false for a filter of several aggregate types.
func typeOf(filter, prefix string) (aggregateType, eventType string, one bool) {
	rest, is := strings.CutPrefix(filter, prefix+".")
	tokens := strings.Split(rest, ".")
	if !is || len(tokens) != 4 || tokens[2] == "*" || tokens[2] == ">" {
		return "", "", false
	}
	return tokens[2], tokens[3], true
}
