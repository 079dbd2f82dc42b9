package outbox

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func appendRows(t *testing.T, pool *pgxpool.Pool, events ...event.Event) []event.Event {
	t.Helper()
	err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return Append(t.Context(), tx, events) })
	if err != nil {
		t.Fatal(err)
	}
	return events
}

func newEvent(aggregate event.ID, payload string) event.Event {
	return event.Event{TenantID: 1, AggregateType: "post", AggregateID: aggregate, Type: "created", Payload: json.RawMessage(payload)}
}

func TestTheSpecsInsertWorksAndSlotsAreStable(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	var slot int
	var delayed bool
	if err := pool.QueryRow(t.Context(), `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
		VALUES (1, 'Order', 42, 'OrderConfirmed', '{}', 'trace') RETURNING slot, delayed`).Scan(&slot, &delayed); err != nil {
		t.Fatal(err)
	}
	if slot != 25 || delayed { // md5("1/Order/42") begins with 79, and 0x79 & 31 is 25
		t.Errorf("slot %d, delayed %t: want 25, false. A slot that changes breaks the order of every aggregate.", slot, delayed)
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{
		"append": appendSQL, "append JSON": appendJSONSQL,
		"begin round": beginRoundSQL, "walk": walkSQL, "appended": appendedSQL, "below floor": belowFloorSQL,
		"claim": claimSQL, "claim few": fewSQL, "due": dueSQL, "state": stateSQL, "park": parkSQL,
		"unpark": unparkSQL, "fail": failSQL, "mark": markSQL, "caught up": caughtUpSQL, "partitions": partitionsSQL,
		"positions": positionsSQL, "bind": bindSQL, "close": closeSQL,
		"lock partitions": lockPartitionsSQL, "closing": closingSQL, "add partition": addPartitionSQL, "stats": statsSQL, "slots": slotsSQL,
		"delivered": deliveredSQL, "waiting aggregates": waitingAggregatesSQL, "published": countPublishedSQL, "in place": inPlaceSQL,
		"retry": retryDLQSQL, "discard": discardDLQSQL,
		"before": beforeSQL, "after": afterSQL, "retrying": retryingSQL,
		"list waiting": listWaitingSQL, "get waiting": getWaitingSQL, "retry waiting": retryWaitingSQL,
		"put off": putOffSQL, "take back": takeBackSQL, "kill": killSQL,
		"ranges": rangesSQL, "make range": makeRangeSQL, "cut range": cutRangeSQL, "written since": writtenSinceSQL, "settle": settleSQL,
		"archive range": archiveRangeSQL,
		"index range":   indexRangeSQL, "archive late": archiveLateSQL, "span": spanRangeSQL, "drop range": dropRangeSQL,
		"bound locks": boundLocksSQL, "no timeout": noTimeoutSQL, "one worker": oneWorkerSQL, "trim kept": trimKeptSQL,
		"count lost": ofTable(countLostSQL, TableArchive), "restore": restoreSQL, "lost in range": lostInRangeSQL,
		"return range": returnRangeSQL, "requeue": ofTable(requeueSQL, TableArchive), "next id": nextIDSQL,
		"sweep end": ofTable(sweepEndSQL, TableOutbox), "sweep of actor": ofTable(sweepActorSQL, TableKept), "sweep": sweepOutboxSQL,
		"sweep of DLQ": sweepDLQSQL, "sweep of archive": ofTable(sweepArchiveSQL, TableArchive),
		"redact": redactSQLOf(TableOutbox), "redact in DLQ": redactSQLOf(TableDLQ), "redact in archive": redactSQLOf(TableArchive),
		"unmark": ofTable(unmarkSQL, TableOutbox), "unmark in archive": ofTable(unmarkSQL, TableArchive),
		"find by id": archiveRow + byID, "find by event": dlqRow + byEvent, "find by id and event": outboxRow + byIDAndEvent,
		"ids of event":      idsOfEventSQL,
		"find by aggregate": archiveRow + byAggregate, "find by aggregate in the DLQ": dlqRow + dlqByAggregate,
		"find by time": keptRow + byTime, "find by range": outboxRow + byIDRange,
		"older": olderSQL, "archive of aggregate": archiveRow + olderOfAggregate, "DLQ of aggregate": dlqRow + olderOfAggregate,
		"waiting of aggregate": waitingOfAggregate, "probe sequence": probeSeqSQL,
		"at sequence": outboxRow + bySeq, "actions on event": actionsOnEventSQL, "range of": rangeOfSQL, "lowest open": lowestOpenSQL,
		"heartbeat": heartbeatSQL, "next heartbeat": nextHeartbeatSQL, "probe": probeSQL, "edges": edgesSQL, "lock holds": lockHoldsSQL,
		"add hold": addHoldSQL, "list holds": listHoldsSQL, "release hold": releaseHoldSQL, "held": heldSQL, "held whole": heldWholeSQL,
		"held month":   heldMonthSQL,
		"walk archive": walkArchiveSQL, "any archived": anyArchivedSQL, "restore archive": restoreArchiveSQL,
		"canonical archive": canonicalArchiveSQL,
		"redo":              redoSQL, "redo moved": redoMovedSQL, "lower all floors": lowerAllFloorsSQL, "raise ids": raiseIDsSQL,
	} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
	for _, sql := range deadTable.Statements() {
		testkit.Prepare(t, pool, sql)
	}
	for _, tables := range searchRows {
		for _, table := range tables {
			testkit.Prepare(t, pool, table+searchFilter)
		}
	}
}
