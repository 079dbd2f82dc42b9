// A reader of the kinds of a book club. The code of docs/typescript.md about events of one's own kinds, word for word. The test
// generates ./tidings, compiles this file and runs it. It publishes what it reads before the acknowledgment.
import { connect } from '@nats-io/transport-node';

declare const process: { argv: string[]; pid: number };

const nc = await connect(JSON.parse(process.argv[2] as string));
const tell = (told: object) => nc.publish('told.club', JSON.stringify({ ...told, pid: process.pid }));
const count = (reading: ReadingEvent) => tell({ reading });
const mail = (note: Note) => tell({ note });
const options = { inOrder: true, takeover: 2000, attempts: 100, log: { info() {}, warn: console.error, error: console.error } };

import { handle } from '@tidings/client/subscribe';
import type { Note, Reading } from './tidings/index.js';

type ReadingEvent = Omit<Reading, 'status'> & { status: 'ACTIVE' | 'REMOVED' };
await Promise.all([
  handle<ReadingEvent>(nc, 'trending', 'reading.*', (event) => count(event.data), { ...options, declared: ['reading.*'] }),
  handle<Note>(nc, 'mailer', 'note.created', (event) => mail(event.data), { ...options, declared: ['note.created'] }),
]);
// @ts-expect-error: no such member
void ((reading: ReadingEvent) => reading.song_id);
