// The code of docs/typescript.md about kinds of one's own, word for word. The test generates ./tidings, compiles this file and runs it.
import { each, ifMatch, Tidings } from '@tidings/client';

declare const process: { argv: string[] };

const [url, token] = process.argv.slice(2) as [string, string];
const tidings = new Tidings({ url, token });
const session = tidings.session();

import { Operations, type BatchPlaysData } from './tidings/index.js';

const own = new Operations({ client: session.http }); // or tidings.http
const play = await own.putPlay({ path: { user_id: '7', song_id: '5' }, body: { device: 'phone' } });
await own.patchPlay({ path: { user_id: '7', song_id: '5' }, body: { device: 'radio' }, headers: ifMatch(play) });
for await (const player of each((r) => own.listSongPlayers(r), { path: { song_id: '5' } })) console.log(player.user_id);

const plays: BatchPlaysData['body']['operations'] = [{ op: 'put', user_id: '8', song_id: '5' }];
for await (const { outcome } of session.batch('plays', plays)) if (outcome.problem) console.error(outcome.problem.code);

console.log((await own.getPlay({ path: { user_id: '7', song_id: '5' } })).attributes.device);
await own.getPlay({ path: { user_id: '9', song_id: '5' } }).catch((error) => console.log(error.code));
console.log(session.tokens.length);
// @ts-expect-error: no such device
void (() => own.putPlay({ path: { user_id: '7', song_id: '5' }, body: { device: 'tape' } }));
