package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/upstreams"
)

// oldestServer is the first version of nats-server that has atomic batches (its release notes of
// 2.12). Relays publish with them.
var oldestServer = [2]int{2, 12}

// enable returns what makes JetStream answer. The server that has no JetStream answers like one
// whose cluster has no leader, except for the code.
func enable(err error) string {
	if broker.IsTransient(err) && !errors.Is(err, jetstream.ErrJetStreamNotEnabled) &&
		!errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
		return "start the servers of the cluster that are down (docs/runbook/LosingBrokers.md)"
	}
	return "enable JetStream in the server's configuration and for the account"
}

// Broker checks the server of the connection and the streams of the partitions. It ignores streams
// without a leader and streams that do not exist.
func Broker(ctx context.Context, nc *nats.Conn, cfg broker.Config, partitions []broker.Partition) ([]Finding, error) {
	where := "NATS"
	all := serverVersion(where, nc.ConnectedServerVersion())
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("use JetStream: %w", err)
	}
	if cfg.Credentials != "" {
		if user, err := broker.ReadUser(cfg.Credentials); err != nil {
			all = append(all, finding("nats-credentials", where, fmt.Sprintf("the next connection of this command fails: %v", err),
				"correct NATS_CREDENTIALS or the rights of its file"))
		} else {
			all = append(all, credentials(where, user, time.Now())...)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	account, err := js.AccountInfo(ctx)
	if err != nil {
		return append(all, finding("jetstream", where,
			fmt.Sprintf("JetStream does not answer for this account, so relays and consumers do nothing: %v", err), enable(err))), nil
	}
	all = append(all, storage(where, account.Store, account.Limits.MaxStore)...)
	for _, p := range partitions {
		found, err := stream(ctx, js, cfg, p)
		if err != nil && !broker.IsTransient(err) && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, err
		}
		all = append(all, found...)
	}
	if cfg.Unmanaged {
		if err := broker.HasErasedBucket(ctx, js, cfg); errors.Is(err, broker.ErrMissing) {
			all = append(all, finding("stream-missing", where, "no erasure can run: "+err.Error(),
				"create what tidings stream plan prints"))
		} else if err != nil && !broker.IsTransient(err) {
			return nil, err
		}
	}
	dead, err := js.Stream(ctx, cfg.DeadStream())
	if err == nil && !dead.CachedInfo().Config.DenyPurge {
		all = append(all, finding("stream-purge", cfg.DeadStream(),
			"an older release created it, so one request can purge all dead letters of subscribers",
			"run tidings stream configure with a current value, such as --max-age; it denies purges of every stream"))
	}
	return all, nil
}

// credentials returns a finding if a user's credentials expire soon: the same rule as the alert
// CredentialsExpire.
func credentials(where string, u broker.User, now time.Time) []Finding {
	left := u.Expires.Sub(now)
	if u.Expires.IsZero() || left >= ExpiryDays*24*time.Hour || left >= u.Expires.Sub(u.Issued)/ExpiryShare {
		return nil
	}
	return []Finding{finding("nats-credentials", where,
		fmt.Sprintf("the credentials of %s expire at %s", u.Name, u.Expires.UTC().Format(time.RFC3339)),
		"sign new ones with tidings nats creds")}
}

func stream(ctx context.Context, js jetstream.JetStream, cfg broker.Config, p broker.Partition) (all []Finding, err error) {
	name := cfg.StreamName(p.Number)
	refused, reset, err := broker.Inspect(ctx, js, cfg, p)
	if err != nil {
		return nil, err
	}
	if len(refused) > 0 {
		all = append(all, finding("stream-shape", name, strings.Join(refused, "; "),
			"undo the change with `nats stream edit` (tidings stream plan prints the settings), or replace the "+
				"stream: tidings repair stream"))
	}
	if reset {
		all = append(all, finding("stream-limits", name,
			"a limit, the discard policy, the republish rule, the denial of purges or the number of replicas differs from what "+
				"Tidings sets",
			"restart a relay: it restores Tidings' values. To change a limit permanently, run tidings stream configure"))
	}
	before := time.Now()
	s, err := broker.ReadStream(ctx, js, cfg, p.Number)
	if err != nil {
		return all, err
	}
	if len(cfg.Tags) > 0 && !broker.SameTags(cfg.Tags, s.Tags) {
		all = append(all, finding("stream-placement", name,
			fmt.Sprintf("its placement tags are %q, and NATS_PLACEMENT_TAGS is %q", s.Tags, cfg.Tags),
			"tidings stream configure --placement-tags "+strings.Join(cfg.Tags, ",")+", or correct NATS_PLACEMENT_TAGS"))
	}
	all = append(all, skew(name, s.At, before, time.Now())...)
	return append(all, storage(name, s.Bytes, s.MaxBytes)...), nil
}

// serverVersion returns a finding if relays cannot publish to a server of the version.
func serverVersion(where, version string) []Finding {
	var have [2]int
	for i, part := range strings.SplitN(version, ".", 3) {
		if n, err := strconv.Atoi(part); err == nil && i < len(have) {
			have[i] = n
		}
	}
	if have[0] > oldestServer[0] || have[0] == oldestServer[0] && have[1] >= oldestServer[1] {
		return nil
	}
	return []Finding{finding("nats-version", where,
		fmt.Sprintf("nats-server %s is older than %d.%d and has no atomic batches: relays cannot publish", version, oldestServer[0],
			oldestServer[1]), "upgrade the NATS servers")}
}

// storage compares the bytes used with a limit. 0 or less means that there is no limit.
func storage(where string, used uint64, limit int64) []Finding {
	if limit <= 0 || float64(used) <= FullShare*float64(limit) {
		return nil
	}
	return []Finding{finding("storage", where, fmt.Sprintf("%s of %s bytes are used; at the limit NATS refuses every publish",
		words.Count(int64(used)), words.Count(limit)),
		"raise the limit or shorten the age of the streams with tidings stream configure")}
}

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
