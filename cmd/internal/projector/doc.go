// Package projector wires the parts that all projector binaries share: one projection behind one
// consumer. It is for the processes of projections.
//
//	NATS ──▶ consumers.Consumer ──▶ projection ──▶ projections database        ops port: lag, readiness
//	                                                   ▲ compared, window by window (Drift)
//	                                                   ▼
//	                                            the truth's database, where it is configured
package projector
