package console

import (
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
)

// The groups of the navigation, in order.
const (
	groupSee      = "See"
	groupRepair   = "Repair"
	groupModerate = "Moderate"
	groupManage   = "Manage"
)

// allPages returns the pages in the order of the navigation. The path of the first page is empty.
func (c *Console) allPages() []*page {
	return []*page{
		{path: "", title: "Overview", key: "o", group: groupSee, live: true, data: c.overviewData},
		{path: "day", title: "Last day", key: "y", group: groupSee, system: true, live: true, data: c.dayData},
		{path: "event", title: "Event", key: "e", group: groupSee, live: true, follows: isTail, tenant: true,
			data: c.eventData},
		{path: "retrying", title: "Retrying", key: "r", group: groupRepair, live: true, tenant: true, data: c.retryingData},
		{path: "dead-letters", title: "Dead letters", key: "l", group: groupRepair, tenant: true, data: c.deadGroupsData},
		{path: "dead-letters/letters", title: "Dead letters", tenant: true, data: c.deadLettersData},
		{path: "dead-letters/letter", title: "Dead letter", tenant: true, data: c.deadLetterData},
		{path: "dead-letters/operation", title: "Operation", live: true, tenant: true, data: c.deadOperationData},
		{path: "inspect", title: "Inspector", key: "i", group: groupSee, tenant: true, data: c.inspectData},
		{path: "partitions", title: "Partitions", key: "p", group: groupSee, system: true, live: true, data: c.partitionsData},
		{path: "consumers", title: "Consumers", key: "c", group: groupSee, system: true, live: true, data: c.consumersData},
		{path: "kinds", title: "Kinds", key: "k", group: groupManage, data: c.kindsData},
		{path: "doctor", title: "Doctor", key: "d", group: groupSee, system: true, data: c.doctorData},
		{path: "moderation", title: "Moderation", key: "m", group: groupModerate, live: true, tenant: true, data: c.moderationData},
		{path: "moderation-threads", title: "Threads that wait", key: "h", group: groupModerate, tenant: true, data: c.threadsData},
		{path: "decisions", title: "Decisions", key: "s", group: groupModerate, tenant: true, data: c.decisionsData},
		{path: "archive", title: "Archive", key: "v", group: groupManage, system: true, data: c.archiveData},
		{path: "erasure", title: "Erasure", key: "x", group: groupManage, system: true, data: c.erasureData},
		{path: "tokens", title: "Tokens", key: "t", group: groupManage, role: tokens.RoleAdmin, tenant: true, data: c.tokensData},
		{path: "audit", title: "Audit log", key: "a", group: groupManage, tenant: true, data: c.auditData},
	}
}

// allActs returns the acts that pages offer.
func (c *Console) allActs() []*act {
	return []*act{
		{name: actRetryDead, label: "Retry", role: tokens.RoleAdmin, prepare: c.prepareDeadLetters(deadletter.Retry),
			do: c.doDeadLetters(deadletter.Retry)},
		{name: actDiscardDead, label: "Discard", role: tokens.RoleAdmin, irreversible: true,
			prepare: c.prepareDeadLetters(deadletter.Discard),
			do:      c.doDeadLetters(deadletter.Discard)},
		{name: "dead_letter.stop", label: "Stop", role: tokens.RoleAdmin, prepare: c.prepareDeadStop, do: c.doDeadStop},
		{name: "dead_letter.note", label: "Write a note", role: tokens.RoleAdmin, prepare: c.prepareDeadNote, do: c.doDeadNote},
		{name: actRetryWaiting, label: "Retry now", role: tokens.RoleAdmin, prepare: c.prepareWaiting(effectOfRetry),
			do: c.doWaiting(outbox.RetryWaiting, "Message %d is due now. A relay tries it within seconds.")},
		{name: actKill, label: "Kill", role: tokens.RoleAdmin, prepare: c.prepareWaiting(effectOfKill),
			do: c.doWaiting(outbox.KillWaiting, "Message %d is in the DLQ.")},
		{name: "moderation.decide", label: "Decide", role: tokens.RoleModerate, prepare: c.prepareDecide, do: c.doDecide},
		{name: actDecideAll, label: "Decide on all", role: tokens.RoleModerate, prepare: c.prepareDecideAll, do: c.doDecideAll},
		{name: actUndo, label: "Undo all of it", role: tokens.RoleModerate, prepare: c.prepareUndo, do: c.doUndo},
		{name: "thread.settings", label: "Change settings", role: tokens.RoleModerate, prepare: c.prepareSettings, do: c.doSettings},
		{name: "inspect.repair", label: "Repair", role: tokens.RoleAdmin, prepare: c.prepareRepair, do: c.doRepair},
		{name: "consumer.pause", label: "Pause", role: tokens.RoleAdmin, system: true, do: c.doPause,
			prepare: c.prepareConsumer("The consumer applies no events until you resume it. They wait on the stream, which keeps "+
				"them for NATS_MAX_AGE.", "Meanwhile its projection falls behind.")},
		{name: actResume, label: "Resume", role: tokens.RoleAdmin, system: true, do: c.doResume,
			prepare: c.prepareConsumer("The consumer continues where it stopped.")},
		{name: actVerify, label: "Verify", role: tokens.RoleAdmin, system: true, do: c.doVerify,
			prepare: c.prepareConsumer("Verify compares every row of the projection with the truth. It reads both in full and changes " +
				"nothing.")},
		{name: actReplay, label: "Replay", role: tokens.RoleAdmin, system: true, irreversible: true, limit: replayTimeout,
			prepare: c.prepareReplay, do: c.doReplay},
		{name: "hold.add", label: "Add a hold", role: tokens.RoleAdmin, system: true, prepare: c.prepareHoldAdd, do: c.doHoldAdd},
		{name: "hold.release", label: "Release", role: tokens.RoleAdmin, system: true, irreversible: true,
			prepare: c.prepareHoldRelease, do: c.doHoldRelease},
		{name: actScan, label: "Scan", role: tokens.RoleAdmin, system: true, do: c.doErase(true),
			prepare: c.prepareErase("The scan searches every store for remaining data of the person, including the streams " +
				"and exported files. It changes nothing.")},
		{name: "erasure.start", label: "Erase a person", role: tokens.RoleAdmin, system: true, irreversible: true, do: c.doErase(false),
			prepare: c.prepareErasure("The erasure permanently removes what the user wrote, and the edges from and to them, "+
				"from every store. It keeps no copy.",
				"Meanwhile the archiver's jobs wait, and no replay runs. The erasure ends when a scan of all stores finds "+
					"nothing. If it is interrupted, start it again.")},
		{name: actKinds, label: "Change the kinds", role: tokens.RoleAdmin, system: true, prepare: c.prepareKinds, do: c.doKinds},
		{name: "token.create", label: "Create a token", role: tokens.RoleAdmin, prepare: c.prepareTokenCreate, do: c.doTokenCreate},
		{name: "token.rotate", label: "Rotate", role: tokens.RoleAdmin, prepare: c.prepareTokenRotate, do: c.doTokenRotate},
		{name: "token.revoke", label: "Revoke", role: tokens.RoleAdmin, irreversible: true,
			prepare: c.prepareTokenRevoke, do: c.doTokenRevoke},
	}
}
