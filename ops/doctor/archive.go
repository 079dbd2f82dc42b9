package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
)

// archive returns the months of the outbox's archive that have ranges without an export.
func archive(ctx context.Context, truth *pgxpool.Pool) ([]Finding, error) {
	settings, _, err := upkeep.Read(ctx, truth)
	if err != nil {
		return nil, err
	}
	cold := coldstore.New(truth, "", nil, nil, nil)
	exported, err := cold.List(ctx)
	if err != nil {
		return nil, err
	}
	due, err := cold.Due(ctx)
	if err != nil {
		return nil, err
	}
	return exports(settings.OutboxExportURL, len(exported) > 0, due, time.Now()), nil
}

// schema returns a finding if a newer release has migrated the schema. With an older schema no
// command works (migrations.ErrOutdated).
func schema(ctx context.Context, pool *pgxpool.Pool, set migrations.Set) ([]Finding, error) {
	have, err := migrations.Version(ctx, pool, set)
	want := migrations.Latest(set)
	if err != nil || have <= want {
		return nil, err
	}
	return []Finding{finding("schema-newer", "schema of the "+string(set),
		fmt.Sprintf("it is at version %d, and this program knows versions up to %d: a newer release migrated it", have, want),
		"upgrade this program and the others of its release")}, nil
}

// exportLate is the time after a range's move to the archive at which its missing export is a
// finding. The job runs many times a day.
const exportLate = 24 * time.Hour

// exports returns the months of the archive that have ranges without an export. It returns none if
// exports are off and no range was ever exported.
func exports(url string, exported bool, due []outbox.Range, now time.Time) (all []Finding) {
	if url == "" && !exported {
		return nil
	}
	ranges := map[string]int64{}
	for _, r := range due {
		if now.Sub(r.ArchivedAt) > exportLate {
			ranges[r.FirstAt.UTC().Format("2006-01")]++
		}
	}
	for _, month := range slices.Sorted(maps.Keys(ranges)) {
		without := words.Of(ranges[month], "range") + " without an export"
		f := finding("archive-export", "archive of "+month, without+": the archiver keeps each until it is exported",
			"tidings archive export --month "+month)
		if url == "" {
			f.What = without + ", and exports are off: the archiver drops them without one"
			f.Repair = "tidings archive settings outbox_archive_export_url=URL --reason WHY"
		}
		f.Count = ranges[month]
		all = append(all, f)
	}
	return all
}
