package api

import (
	"context"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/projections/history"
)

// VersionInfo has the metadata of a version: who made it, and when.
type VersionInfo struct {
	Version      int64        `json:"version" example:"3" doc:"The version of the object; rises by one with each change."`
	VersionID    event.Number `json:"version_id" example:"100000000023" doc:"The id of this record, unique within its kind."`
	VersionState string       `json:"version_state" enum:"LATEST,ARCHIVED,DELETED" example:"LATEST" doc:"LATEST: the current version. DELETED: the last version of a deleted object. ARCHIVED: a later version follows."`
	Actor        string       `json:"actor,omitempty" example:"user:7" doc:"The actor of the change, or the word unrecorded if only the result is known. Absent from a version of a child that shows no author."`
	At           event.Time   `json:"at" format:"date-time" doc:"When the change was made."`
}

func infoOf[T any](v versioned.Version[T], version int64) VersionInfo {
	return VersionInfo{Version: version, VersionID: event.Number(v.Metadata.VersionID), VersionState: string(v.Metadata.VersionState),
		Actor: v.Metadata.CreatedBy, At: event.Time{Time: v.Metadata.LastUpdateTime}}
}

// before returns the position before which a page of versions begins.
func (s *server) before(l list, cursor string) (int64, error) {
	before := int64(math.MaxInt64)
	if cursor == "" {
		return before, nil
	}
	err := s.cursors.decode(l, cursor, &before)
	return before, err
}

// past reads a page of versions from the archiver's histories, in one transaction of the tenant, on
// one snapshot. asOf is the as_of of the snapshot. read reads up to one row more than the limit.
func past[T any](ctx context.Context, s *server, l list, p Page,
	read func(tx pgx.Tx, before int64) ([]versioned.Version[T], error),
) (rows []versioned.Version[T], next string, asOf event.Time, err error) {
	before, err := s.before(l, p.Cursor)
	if err != nil {
		return nil, "", asOf, err
	}
	err = postgres.InShortTenant(ctx, s.projections, l.tenant,
		pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			at, err := s.readProgress(ctx, tx, l.tenant, history.Name)
			if err != nil {
				return err
			}
			asOf = at.asOf
			rows, err = read(tx, before)
			return err
		})
	if err != nil {
		return nil, "", asOf, err
	}
	rows, next, err = newPage(s, l, p.Limit, rows, position)
	return rows, next, asOf, err
}

func position[T any](v versioned.Version[T]) any { return v.Position }
