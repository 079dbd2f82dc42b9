import type { MsgHdrs } from '@nats-io/transport-node';
import { required, type Events } from '../generated/events.js';
import { PermanentError } from './errors.js';

export type { Events } from '../generated/events.js';
export type * from '../generated/events/types.gen.js';

type Kind<E> = E extends `${infer K}.${string}` ? K : never;

/** A type of events of the built-in kinds: `follow.created`, or `follow.*` for all events of follows. */
export type EventType = keyof Events | `${Kind<keyof Events>}.*`;

/** The payload of a type of events. */
export type DataOf<E extends EventType> = E extends `${infer K}.*` ? Events[Extract<keyof Events, `${K}.${string}`>] : Events[Extract<E, keyof Events>];

/** An event with its payload. */
export interface Event<T> {
  /** A UUID, the same in each delivery. */
  id: string;
  tenantId: string;
  aggregateType: string;
  aggregateId: string;
  /** The part of the type after the dot: `created`. */
  type: string;
  /** The version of the payload's shape. */
  version: number;
  /** RFC 3339, with microseconds. */
  occurredAt: string;
  /** The trace of the event's creation (W3C), if it has one. */
  traceparent: string | undefined;
  stream: string;
  /** The position on the stream. */
  sequence: number;
  data: T;
  /** 1 when a handler gets the event for the first time. */
  attempt: number;
}

/** The envelope of an event. */
export type Envelope = Omit<Event<unknown>, 'data' | 'attempt'>;

const uuid = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;
const id = /^[A-Za-z0-9._~:@|+=-]{1,128}$/;

/** Reports whether a relay wrote the message. */
export function isOurs(h: MsgHdrs | undefined): boolean {
  return h !== undefined && h.get('ce-source') !== '' && uuid.test(h.get('ce-id')) && /^[1-9]\d*$/.test(h.get('Tidings-Outbox-Id'));
}

/** Reads the envelope. `fault` says why the message is damaged; even then the envelope has the parts that can be read. */
export function decode(subject: string, h: MsgHdrs, stream: string, sequence: number): { event: Envelope; fault?: Error } {
  const [tenant = '', aggregateType = '', type = ''] = subject.split('.').slice(-3);
  const of = h.get('ce-type');
  const version = of.slice(of.lastIndexOf('.v') + 2);
  const event: Envelope = {
    id: h.get('ce-id'), tenantId: tenant.slice(1), aggregateType, aggregateId: h.get('ce-subject'), type, version: Number(version),
    occurredAt: h.get('ce-time'), traceparent: h.get('traceparent') || undefined, stream, sequence,
  };
  const faults = [
    !/^t\d+$/.test(tenant) && `subject is ${subject.slice(0, 200)}`,
    !id.test(event.aggregateId) && `ce-subject is ${event.aggregateId.slice(0, 80)}`,
    !(/^\d+$/.test(version) && of.endsWith(`.${aggregateType}.${type}.v${version}`)) && `ce-type is ${of.slice(0, 200)}`,
    Number.isNaN(Date.parse(event.occurredAt)) && `ce-time is ${event.occurredAt.slice(0, 80)}`,
  ].filter(Boolean);
  return faults.length === 0 ? { event } : { event, fault: new PermanentError(`decode event ${event.id.slice(0, 80)}: ${faults.join('; ')}`) };
}

const known: Record<string, { version: number; members: Record<string, string> } | undefined> = required;

/** Reads a payload. Throws a PermanentError if it is not JSON, or lacks what events of its type have. */
export function parse(event: Envelope, payload: Uint8Array): unknown {
  const of = `${event.aggregateType}.${event.type}`;
  const fail = (why: string) => new PermanentError(`decode the payload of event ${event.id} (${of}.v${event.version}): ${why}`);
  let data: unknown;
  try {
    data = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(payload));
  } catch (error) {
    throw fail(String(error));
  }
  const shape = Object.hasOwn(known, of) ? known[of] : undefined;
  if (shape === undefined) return data; // of a kind or an upstream of yours
  if (shape.version !== event.version) throw fail('this release does not know that version');
  for (const [member, type] of Object.entries(shape.members)) {
    const value = (data as Record<string, unknown> | null)?.[member];
    if (typeof value !== type) throw fail(`${member} is ${value === undefined ? 'missing' : `no ${type}`}`);
  }
  return data;
}

/** Reports whether events of the type exist: `KIND.EVENT` or `KIND.*`. */
export function isDeclared(type: string, declared: readonly string[]): boolean {
  const all = [...Object.keys(known), ...declared];
  return type.endsWith('.*') ? all.some((t) => t.startsWith(type.slice(0, -1))) : all.includes(type);
}
